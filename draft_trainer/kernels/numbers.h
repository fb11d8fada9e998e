/* Shared by the kernels: bfloat16, 2^x, and loops that a compiler vectorises. */
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#else
static inline int omp_get_thread_num(void) { return 0; }
#endif

#define LOG2E 1.4426950408889634f
#define INLINE static inline __attribute__((always_inline))

INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* Element i of float32 or, unless `wide`, bfloat16. */
INLINE float load(const void *from, int64_t i, int64_t wide) {
    return wide ? ((const float *)from)[i] : float_of((uint32_t)((const uint16_t *)from)[i] << 16);
}

/* Rounded to nearest, ties to even, as torch does it. */
INLINE void store(void *to, int64_t i, float x, int64_t wide) {
    if (wide) {
        ((float *)to)[i] = x;
    } else {
        uint32_t bits;
        memcpy(&bits, &x, 4);
        uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        ((uint16_t *)to)[i] = x == x ? (uint16_t)rounded : 0x7fc0;
    }
}

/* 2^x to 2 units in the last place; infinity above 128, 2^-126 below -126, NaN for NaN. */
INLINE float exp2_of(float x) {
    x = x < -126.0f ? -126.0f : x;
    x = x > 128.0f ? 128.0f : x;
    float whole = nearbyintf(x), part = x - whole;
    float y = 1.535336188319500e-4f;
    y = y * part + 1.339887440266574e-3f;
    y = y * part + 9.618437357674640e-3f;
    y = y * part + 5.550332471162809e-2f;
    y = y * part + 2.402264791363012e-1f;
    y = y * part + 6.931472028550421e-1f;
    y = y * part + 1.0f;
    return y * float_of((uint32_t)((int32_t)whole + 127) << 23);
}
