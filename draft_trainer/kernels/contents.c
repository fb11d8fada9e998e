/* What draft_trainer/feed/contents.py looks at beside the states, of blocks that hold one sequence in
 * order, as most do. */
#include <string.h>

#include "numbers.h"

INLINE uint32_t word_at(const uint8_t *from, int64_t index) {
    uint32_t x;
    memcpy(&x, from + 4 * index, 4);
    return x;
}

/* Without a branch: it is nearly always right, and then all of it is looked at anyway. */
INLINE int is_right(const uint8_t *block, int64_t tokens, uint32_t vocab, float tolerance) {
    const uint8_t *positions = block + 4 * tokens, *segments = positions + 4 * tokens;
    const uint8_t *logprobs = segments + 4 * tokens, *logits = logprobs + 4 * tokens;
    const uint8_t *mask = logits + 4 * tokens;
    const int64_t first = (int32_t)word_at(positions, 0);
    uint32_t bad = first < 0;
    uint8_t targets = 0, bits = 0;
    for (int64_t t = 0; t < tokens; t++) {
        /* Read as unsigned a negative number is beyond every bound. */
        bad |= word_at(block, t) >= vocab;
        bad |= (int32_t)word_at(positions, t) != first + t;
        bad |= word_at(segments, t) != 0;
        bad |= (word_at(logits, t) & 0x7f800000) == 0x7f800000;
        bad |= (word_at(logprobs, t) & 0x7f800000) == 0x7f800000;
        float logprob;
        memcpy(&logprob, logprobs + 4 * t, 4);
        bad |= logprob > tolerance;
        bits |= mask[t];
    }
    /* What an anchor can predict begins with the third token. */
    for (int64_t t = 2; t < tokens; t++) targets |= mask[t];
    return !bad && bits <= 1 && targets;
}

/* Of `count` blocks: whether each is right, the tokens before the first completion, and those, of 64
 * bits, from the beginning of each row of `ids`, [count, tokens]. */
void contents(const uint8_t *const *blocks, int64_t count, int64_t tokens, int64_t vocab,
              float tolerance, int64_t *right, int64_t *prompts, int64_t *ids) {
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *block = blocks[i], *mask = block + 20 * tokens;
        right[i] = is_right(block, tokens, (uint32_t)vocab, tolerance);
        int64_t prompt = 0;
        while (prompt < tokens && !mask[prompt]) prompt++;
        prompts[i] = prompt;
        for (int64_t t = 0; t < prompt; t++) ids[i * tokens + t] = (int32_t)word_at(block, t);
    }
}
