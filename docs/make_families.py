"""``python -m docs.make_families``: the table of policy families in docs/integrations.md.

What ``tests/policy_bridge/families.py`` finds of a tiny random model of each family, whether the
installed vLLM gives an EAGLE-3 draft the states of that class, and what becomes of a push into it.
"""

from __future__ import annotations

from pathlib import Path

from docs.generated import with_generated
from tests.policy_bridge.families import FAMILIES, NOT_PUSHED, Outcome, outcome

PAGE = Path(__file__).resolve().parent / "integrations.md"
_HEAD = (
    "| family | class | lm_head | teacher's mass | trained on | `init` | EAGLE-3 in vLLM 0.32 "
    "| pushed into it |\n"
    "|---|---|---|---|---|---|---|---|\n"
)


_NOTE = (
    "\nNot looked up, not tried: vLLM's class needs torchvision, which is not installed here. "
    "Unknown class: vLLM has none of that name.\n"
)


def row(family: str, found: Outcome) -> str:
    """One line of the table."""
    name = f"| {family} | `{FAMILIES[family][0]}` |"
    if found.refused:
        return f"{name} | | no: `{found.refused}` | {found.init} |"
    mass = f"{found.least:.3f} to {found.most:.3f}"
    return f"{name} {found.lm_head} | {mass} | yes | {found.init} |"


def eagle3_in_vllm(model_class: str) -> str:
    """ "yes" or "no"; "unknown class"; "not looked up" for one that does not import here."""
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.registry import ModelRegistry

    known = ModelRegistry.models.get(model_class)
    if known is None:
        return "unknown class"
    try:
        return "yes" if supports_eagle3(known.load_model_cls()) else "no"
    except ModuleNotFoundError:  # of torchvision: models with images
        return "not looked up"


def page() -> str:
    """The page with the current table."""
    rows = [
        f"{row(family, outcome(family))} {eagle3_in_vllm(FAMILIES[family][0])} | "
        f"{NOT_PUSHED.get(family, 'yes')} |\n"
        for family in FAMILIES
    ]
    return with_generated(PAGE, "make_families", _HEAD + "".join(rows) + _NOTE)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
