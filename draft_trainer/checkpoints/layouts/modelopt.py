"""ModelOpt's exported layout (0.47.0, ``export/plugins/hf_spec_export.py``). Only read.

It is not written: vLLM's V1 runner takes its layer numbers, which count layer outputs from 0, for
"after L layers", and the V2 runner does not see them, so what it names is not what is served.

Its Hugging Face trainer also puts hidden states through ``input_layernorm`` before
``hidden_norm``. vLLM does not, and what vLLM serves is what is read and trained here, so such a
draft starts a little below what it was trained to.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draft_trainer.checkpoints.layouts.layout import Document, Layout, counted, refuse
from draft_trainer.eagle3.head_config import LAYER_IDS, HeadConfig

# Fields of eagle_config that no other exporter writes, with the values that EAGLE-3 has.
_EAGLE_3 = {
    "use_input_layernorm_in_first_layer": (True, None),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False, None),
    "next_layer_regular": (True, None),
    "parallel_draft_step": (1, None),
    "parallel_draft_heads_num_layers": (1, None),
}


def _matches(document: Mapping[str, Any]) -> bool:
    eagle = document.get("eagle_config")
    return isinstance(eagle, Mapping) and "next_layer_regular" in eagle


def _read(document: Document, policy: Path | None) -> tuple[HeadConfig, Document]:
    eagle = document["eagle_config"]
    if eagle.get("use_aux_hidden_state") is not True:
        refuse("eagle_config.use_aux_hidden_state", eagle.get("use_aux_hidden_state"), True)
    for name, allowed in _EAGLE_3.items():
        # Heads of parallel drafting are refused as unknown tensors; their number is not read.
        if name != "parallel_draft_heads_num_layers" and eagle.get(name) not in allowed:
            refuse(f"eagle_config.{name}", eagle.get(name), allowed[0])
    outputs = eagle.get(LAYER_IDS)
    if not outputs:
        refuse(f"eagle_config.{LAYER_IDS}", outputs, "the auxiliary layers, the first being 0")
    ids = [layer + 1 for layer in outputs]
    if document.get(LAYER_IDS) not in (None, ids):
        refuse(LAYER_IDS, document[LAYER_IDS], f"{ids}, one above eagle_config's")
    flat = {name: value for name, value in document.items() if name != "eagle_config"}
    flat = counted({**flat, LAYER_IDS: ids}, ids)
    return HeadConfig.from_dict(flat), flat


MODELOPT = Layout(
    name="modelopt",
    layer="layers.0.",
    leftovers=(),
    matches=_matches,
    read=_read,
    write=None,
)
