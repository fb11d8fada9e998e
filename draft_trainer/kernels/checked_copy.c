/* Copies a sample's block, hashes what it copies and looks for NaN and infinity, in one pass: every
 * stripe is read once, and the very value that was hashed is stored; states past the caches, because
 * training reads them much later. The hash is XXH3_64bits with seed 0 of inputs of more than 240 bytes, from
 * its specification (Collet, github.com/Cyan4973/xxHash, doc/xxhash_spec.md), for little-endian
 * processors. */
#include "guarded.h"
#include "numbers.h"
#ifdef __SSE2__
#include <immintrin.h>
#endif

#define STRIPE 64
#define STRIPES_PER_BLOCK 16
#define AHEAD (16 * STRIPE)

typedef uint64_t Lanes __attribute__((vector_size(STRIPE)));
typedef uint32_t Words __attribute__((vector_size(STRIPE)));
typedef uint16_t Halves __attribute__((vector_size(STRIPE)));
typedef uint8_t Octets __attribute__((vector_size(STRIPE)));

static const uint64_t PRIME32_1 = 0x9E3779B1u, PRIME32_2 = 0x85EBCA77u, PRIME32_3 = 0xC2B2AE3Du;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87u, PRIME64_2 = 0xC2B2AE3D27D4EB4Fu,
                      PRIME64_3 = 0x165667B19E3779F9u, PRIME64_4 = 0x85EBCA77C2B2AE63u,
                      PRIME64_5 = 0x27D4EB2F165667C5u;

static const uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

/* Lane i of `sums` belongs to lane i ^ 1 of the accumulator, which gets it at the end of a block. */
typedef struct {
    Lanes products, sums, bad;
    int64_t stripes;
} State;

INLINE Lanes lanes_at(const uint8_t *from) {
    Lanes x;
    memcpy(&x, from, STRIPE);
    return x;
}

INLINE void put(uint8_t *to, Lanes x) {
#if defined(__AVX512F__)
    _mm512_stream_si512((void *)to, (__m512i)x);
#elif defined(__SSE2__)
    for (int i = 0; i < 8; i += 2)
        _mm_stream_si128((__m128i *)(to + 8 * i), _mm_set_epi64x((int64_t)x[i + 1], (int64_t)x[i]));
#else
    memcpy(to, &x, STRIPE);
#endif
}

/* Lanes that are not 0 where a float of `item` bytes has all bits of `infinity`. */
INLINE Lanes not_finite(Lanes x, int64_t item, uint32_t infinity) {
    if (item == 1) return (Lanes)(((Octets)x & (uint8_t)infinity) == (uint8_t)infinity);
    if (item == 2) return (Lanes)(((Halves)x & (uint16_t)infinity) == (uint16_t)infinity);
    return (Lanes)(((Words)x & infinity) == infinity);
}

INLINE void join(State *state) {
    for (int i = 0; i < 8; i++) state->products[i] += state->sums[i ^ 1];
    state->sums = (Lanes){0};
}

INLINE void accumulate(State *state, Lanes x, const uint8_t *secret) {
    const Lanes key = x ^ lanes_at(secret);
    state->sums += x;
    state->products += (key & 0xffffffffu) * (key >> 32);
}

INLINE void stripe(State *state, uint8_t *to, const uint8_t *from, int check, int64_t item,
                   uint32_t infinity) {
    const Lanes x = lanes_at(from);
    accumulate(state, x, SECRET + 8 * (state->stripes % STRIPES_PER_BLOCK));
    if (check) {
        state->bad |= not_finite(x, item, infinity);
        put(to, x);
    } else {
        memcpy(to, &x, STRIPE);
    }
    if (++state->stripes % STRIPES_PER_BLOCK == 0) {
        join(state);
        const Lanes acc = state->products;
        state->products = (acc ^ (acc >> 47) ^ lanes_at(SECRET + sizeof SECRET - STRIPE)) * PRIME32_1;
    }
}

INLINE uint64_t folded(uint64_t a, uint64_t b) {
    const unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

INLINE uint64_t digest(const State *state, uint64_t nbytes) {
    uint64_t key[8], hash = nbytes * PRIME64_1;
    memcpy(key, SECRET + 11, sizeof key);
    for (int i = 0; i < 8; i += 2)
        hash += folded(state->products[i] ^ key[i], state->products[i + 1] ^ key[i + 1]);
    hash = (hash ^ (hash >> 37)) * 0x165667919E3779F9u;
    return hash ^ (hash >> 32);
}

INLINE uint64_t copy(uint8_t *to, const uint8_t *const *pieces, const int64_t *sizes, int64_t count,
                     int64_t states_at, int64_t item, uint32_t infinity, int64_t *finite) {
    State state = {
        .products = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5,
                     PRIME32_1},
    };
    int64_t nbytes = 0, at = 0;
    for (int64_t i = 0; i < count; i++) nbytes += sizes[i];
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *from = pieces[i];
        const int64_t end = at + sizes[i];
        /* The last stripe of all is hashed with a key of its own. */
        const int64_t whole = end < nbytes ? end : end - STRIPE;
        for (; at < whole && at < states_at; at += STRIPE, from += STRIPE)
            stripe(&state, to + at, from, 0, item, infinity);
        for (; at < whole; at += STRIPE, from += STRIPE) {
            /* The processor's own foresight ends with each page. */
            __builtin_prefetch(from + AHEAD);
            stripe(&state, to + at, from, 1, item, infinity);
        }
        if (at < end) {
            const Lanes x = lanes_at(from);
            accumulate(&state, x, SECRET + sizeof SECRET - STRIPE - 7);
            if (at >= states_at) state.bad |= not_finite(x, item, infinity);
            put(to + at, x);
            at = end;
        }
    }
#ifdef __SSE2__
    _mm_sfence();
#endif
    join(&state);
    uint64_t bad = 0;
    for (int i = 0; i < 8; i++) bad |= state.bad[i];
    *finite = bad == 0;
    return digest(&state, (uint64_t)nbytes);
}

typedef struct {
    uint8_t *to;
    const uint8_t *const *pieces;
    const int64_t *sizes;
    int64_t count, states_at, item;
    uint32_t infinity;
    int64_t finite;
    uint64_t checksum;
} Copy;

static void run(void *what) {
    Copy *c = what;
    /* The size of a float as a constant. */
#define COPY(ITEM) \
    copy(c->to, c->pieces, c->sizes, c->count, c->states_at, ITEM, c->infinity, &c->finite)
    c->checksum = c->item == 1 ? COPY(1) : c->item == 2 ? COPY(2) : COPY(4);
#undef COPY
}

/* `to` begins at a multiple of 64; pieces have whole stripes, 256 bytes or more together; floats of
 * `item` bytes begin at `states_at`, a whole number of stripes. `finite` is -1 where a piece is not
 * there any more: the file that it is mapped from was cut short. */
uint64_t checked_copy(uint8_t *to, const uint8_t *const *pieces, const int64_t *sizes, int64_t count,
                      int64_t states_at, int64_t item, uint32_t infinity, int64_t *finite) {
    Copy all = {to, pieces, sizes, count, states_at, item, infinity, 0, 0};
    *finite = guarded(run, &all) ? -1 : all.finite;
    return all.checksum;
}

typedef struct {
    uint8_t *const *to;
    const uint8_t *const *from;
    int64_t count, nbytes, states_at, item;
    uint32_t infinity;
    uint64_t *checksums;
    int64_t *finite;
} Copies;

static void run_all(void *what) {
    const Copies *r = what;
#define BLOCK(ITEM) \
    copy(r->to[i], r->from + i, &r->nbytes, 1, r->states_at, ITEM, r->infinity, r->finite + i)
    for (int64_t i = 0; i < r->count; i++)
        r->checksums[i] = r->item == 1 ? BLOCK(1) : r->item == 2 ? BLOCK(2) : BLOCK(4);
#undef BLOCK
}

/* As `checked_copy` for each of `count` blocks of `nbytes`. 1 where one is not there any more. */
int checked_copies(uint8_t *const *to, const uint8_t *const *from, int64_t count,
                   int64_t nbytes, int64_t states_at, int64_t item, uint32_t infinity,
                   uint64_t *checksums, int64_t *finite) {
    Copies all = {to, from, count, nbytes, states_at, item, infinity, checksums, finite};
    return guarded(run_all, &all);
}
