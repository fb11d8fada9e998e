/* SwiGLU, RMSNorm and rotary embedding, with backward passes: one pass over rows of float32 or
 * bfloat16, computed in float32. */
#include "numbers.h"

/* Rows whose shares of a weight's gradient are summed together, whatever the number of threads. */
#define BLOCK 64

#define WIDE_OR_NOT(call_wide, call_narrow) \
    if (wide) call_wide;                    \
    else call_narrow

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exp2_of(-x * LOG2E)); }

INLINE void swiglu_row(const void *gate_up, void *out, int64_t size, int64_t wide) {
#pragma omp simd
    for (int64_t i = 0; i < size; i++) {
        float gate = load(gate_up, i, wide);
        store(out, i, gate * sigmoid(gate) * load(gate_up, size + i, wide), wide);
    }
}

INLINE void swiglu_row_backward(const void *gate_up, const void *grad, void *out, int64_t size,
                                int64_t wide) {
#pragma omp simd
    for (int64_t i = 0; i < size; i++) {
        float gate = load(gate_up, i, wide), s = sigmoid(gate), g = load(grad, i, wide);
        store(out, i, g * load(gate_up, size + i, wide) * s * (1.0f + gate * (1.0f - s)), wide);
        store(out, size + i, g * gate * s, wide);
    }
}

/* gate_up [rows, 2 * size] to out [rows, size]. */
void swiglu_forward(const void *gate_up, void *out, int64_t rows, int64_t size, int64_t wide,
                    int64_t threads) {
    const int64_t row_bytes = size * (wide ? 4 : 2);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const char *x = (const char *)gate_up + 2 * r * row_bytes;
        char *y = (char *)out + r * row_bytes;
        WIDE_OR_NOT(swiglu_row(x, y, size, 1), swiglu_row(x, y, size, 0));
    }
}

/* gate_up [rows, 2 * size] and grad [rows, size] to out [rows, 2 * size]. */
void swiglu_backward(const void *gate_up, const void *grad, void *out, int64_t rows, int64_t size,
                     int64_t wide, int64_t threads) {
    const int64_t row_bytes = size * (wide ? 4 : 2);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const char *x = (const char *)gate_up + 2 * r * row_bytes;
        const char *g = (const char *)grad + r * row_bytes;
        char *y = (char *)out + 2 * r * row_bytes;
        WIDE_OR_NOT(swiglu_row_backward(x, g, y, size, 1), swiglu_row_backward(x, g, y, size, 0));
    }
}

INLINE float norm_row(const void *x, const void *weight, void *out, int64_t size, float eps,
                      int64_t wide) {
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < size; i++) {
        float v = load(x, i, wide);
        squares += v * v;
    }
    const float scale = 1.0f / sqrtf(squares / size + eps);
#pragma omp simd
    for (int64_t i = 0; i < size; i++)
        store(out, i, load(x, i, wide) * scale * load(weight, i, wide), wide);
    return scale;
}

/* grad_x may be null, and so may grad_weight. */
INLINE void norm_row_backward(const void *x, const void *weight, const void *grad, float scale,
                              void *grad_x, float *grad_weight, int64_t size, int64_t wide) {
    float along = 0.0f;
#pragma omp simd reduction(+ : along)
    for (int64_t i = 0; i < size; i++)
        along += load(grad, i, wide) * load(weight, i, wide) * (load(x, i, wide) * scale);
    along /= size;
    if (grad_x)
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            float normed = load(x, i, wide) * scale;
            float flowing = load(grad, i, wide) * load(weight, i, wide);
            store(grad_x, i, (flowing - normed * along) * scale, wide);
        }
    if (grad_weight)
#pragma omp simd
        for (int64_t i = 0; i < size; i++)
            grad_weight[i] += load(grad, i, wide) * (load(x, i, wide) * scale);
}

/* x [rows, size], weight [size] to out [rows, size] and scale [rows]. */
void norm_forward(const void *x, const void *weight, void *out, float *scale, int64_t rows,
                  int64_t size, float eps, int64_t wide, int64_t threads) {
    const int64_t row_bytes = size * (wide ? 4 : 2);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const char *from = (const char *)x + r * row_bytes;
        char *to = (char *)out + r * row_bytes;
        WIDE_OR_NOT(scale[r] = norm_row(from, weight, to, size, eps, 1),
                    scale[r] = norm_row(from, weight, to, size, eps, 0));
    }
}

/* grad_x [rows, size]; grad_weight [ceil(rows / BLOCK), size], zeroed, to be summed. */
void norm_backward(const void *x, const void *weight, const void *grad, const float *scale,
                   void *grad_x, float *grad_weight, int64_t rows, int64_t size, int64_t wide,
                   int64_t threads) {
    const int64_t row_bytes = size * (wide ? 4 : 2);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t b = 0; b < (rows + BLOCK - 1) / BLOCK; b++)
        for (int64_t r = b * BLOCK; r < rows && r < (b + 1) * BLOCK; r++) {
            const int64_t at = r * row_bytes;
            char *to = grad_x ? (char *)grad_x + at : 0;
            float *sums = grad_weight ? grad_weight + b * size : 0;
#define ROW(wide)                                                                             \
    norm_row_backward((const char *)x + at, weight, (const char *)grad + at, scale[r], to, sums, \
                      size, wide)
            WIDE_OR_NOT(ROW(1), ROW(0));
#undef ROW
        }
}

INLINE void rotate_row(const void *x, void *out, const float *cos, const float *sin, int64_t heads,
                       int64_t count, int64_t size, int64_t half, float sign, int64_t wide) {
    for (int64_t h = 0; h < heads; h++) {
        const int64_t at = h * size;
        int64_t passed_on = 0;
        if (h < count) {
            passed_on = 2 * half;
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                float first = load(x, at + i, wide), second = load(x, at + half + i, wide);
                float s = sign * sin[i];
                store(out, at + i, first * cos[i] - second * s, wide);
                store(out, at + half + i, second * cos[i] + first * s, wide);
            }
        }
        for (int64_t i = passed_on; i < size; i++) store(out, at + i, load(x, at + i, wide), wide);
    }
}

/* x [rows, heads, size] to out; the first `count` heads are rotated by cos and sin [rows, half],
 * backwards with sign -1. */
void rotate(const void *x, void *out, const float *cos, const float *sin, int64_t rows,
            int64_t heads, int64_t count, int64_t size, int64_t half, float sign, int64_t wide,
            int64_t threads) {
    const int64_t row_bytes = heads * size * (wide ? 4 : 2);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const char *from = (const char *)x + r * row_bytes;
        char *to = (char *)out + r * row_bytes;
        const float *c = cos + r * half, *s = sin + r * half;
        WIDE_OR_NOT(rotate_row(from, to, c, s, heads, count, size, half, sign, 1),
                    rotate_row(from, to, c, s, heads, count, size, half, sign, 0));
    }
}
