/* The second part of ``attention.ttt_attention``: each anchor's keys of the later TTT steps, one per
 * step, joined with the prefix. Computed in float32.
 *
 * q, keys and values are rows of `heads` or `kv_heads` heads of `size` elements; a row's first
 * element is at batch * stride[0] + row * stride[1]. What has no strides is contiguous. */
#include "numbers.h"

#define STEPS 16
/* `call` with a usual head size as a constant: the loops over it are short, and much faster when
 * their length is known to the compiler. */
#define OF_SIZE(call)                \
    switch (size) {                  \
        case 32: call(32); break;    \
        case 64: call(64); break;    \
        case 128: call(128); break;  \
        default: call(size);         \
    }

typedef struct {
    const char *data;
    const int64_t *stride;
} Rows;

INLINE const void *row_of(Rows x, int64_t batch, int64_t row, int64_t head, int64_t size, int64_t wide) {
    return x.data + (batch * x.stride[0] + row * x.stride[1] + head * size) * (wide ? 4 : 2);
}

/* Prefetch a row's heads of `count` tensors: too many streams for the hardware prefetcher. */
INLINE void prefetch(const Rows *all, int64_t count, int64_t at, int64_t rows, int64_t row_bytes,
                     int64_t wide) {
    for (int64_t i = 0; i < count; i++) {
        const char *from = row_of(all[i], at / rows, at % rows, 0, 0, wide);
        for (int64_t byte = 0; byte < row_bytes; byte += 64) __builtin_prefetch(from + byte);
    }
}

INLINE float dot(const void *x, const void *y, int64_t size, int64_t wide) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += load(x, i, wide) * load(y, i, wide);
    return sum;
}

INLINE void join(Rows q, const Rows *keys, const Rows *values, char *out, float *lse, float *scores,
                 int64_t steps, int64_t batch, int64_t row, int64_t rows, int64_t batches,
                 int64_t heads, int64_t group, int64_t size, int64_t wide) {
    const float scale = 1.0f / sqrtf((float)size);
    for (int64_t h = 0; h < heads; h++) {
        const int64_t at = (batch * rows + row) * heads + h;
        char *o = out + at * size * (wide ? 4 : 2);
        const void *query = row_of(q, batch, row, h, size, wide);
        float own[STEPS], p[STEPS], highest = lse[at];
        for (int64_t s = 0; s < steps; s++) {
            own[s] = dot(query, row_of(keys[s], batch, row, h / group, size, wide), size, wide) * scale;
            scores[s * batches * rows * heads + at] = own[s];
        }
        for (int64_t s = 0; s < steps; s++) highest = own[s] > highest ? own[s] : highest;
        const float prefix = exp2_of((lse[at] - highest) * LOG2E);
        float total = prefix;
#pragma omp simd reduction(+ : total)
        for (int64_t s = 0; s < steps; s++) {
            p[s] = exp2_of((own[s] - highest) * LOG2E);
            total += p[s];
        }
        const float share = 1.0f / total;
        float sums[size];
#pragma omp simd
        for (int64_t i = 0; i < size; i++) sums[i] = prefix * load(o, i, wide);
        for (int64_t s = 0; s < steps; s++) {
            const void *value = row_of(values[s], batch, row, h / group, size, wide);
#pragma omp simd
            for (int64_t i = 0; i < size; i++) sums[i] += p[s] * load(value, i, wide);
        }
#pragma omp simd
        for (int64_t i = 0; i < size; i++) store(o, i, sums[i] * share, wide);
        lse[at] = highest + logf(total);
    }
}

/* Also adds to grad_q, contiguous, which holds the prefix' share. grads: steps times the keys'
 * [batches, rows, kv_heads, size] and the values'. */
INLINE void join_backward(Rows q, const Rows *keys, const Rows *values, Rows grad, const float *lse,
                          const float *scores, const float *delta, char *grad_q, char **grads,
                          int64_t steps, int64_t batch, int64_t row, int64_t rows, int64_t batches,
                          int64_t heads, int64_t group, int64_t size, int64_t wide) {
    const float scale = 1.0f / sqrtf((float)size);
    const int64_t kv_heads = heads / group, bytes = wide ? 4 : 2;
    float to_q[group * size], to_key[size], to_value[size];
    for (int64_t kv = 0; kv < kv_heads; kv++) {
        const int64_t first = (batch * rows + row) * heads + kv * group;
#pragma omp simd
        for (int64_t i = 0; i < group * size; i++) to_q[i] = load(grad_q + first * size * bytes, i, wide);
        for (int64_t s = 0; s < steps; s++) {
            const void *key = row_of(keys[s], batch, row, kv, size, wide);
            const void *value = row_of(values[s], batch, row, kv, size, wide);
            for (int64_t i = 0; i < size; i++) to_key[i] = to_value[i] = 0.0f;
            for (int64_t g = 0; g < group; g++) {
                const int64_t h = kv * group + g, at = first + g;
                const void *query = row_of(q, batch, row, h, size, wide);
                const void *flowing = row_of(grad, batch, row, h, size, wide);
                const float p =
                    exp2_of((scores[s * batches * rows * heads + at] - lse[at]) * LOG2E);
                const float d = p * (dot(flowing, value, size, wide) - delta[at]) * scale;
#pragma omp simd
                for (int64_t i = 0; i < size; i++) {
                    to_q[g * size + i] += d * load(key, i, wide);
                    to_key[i] += d * load(query, i, wide);
                    to_value[i] += p * load(flowing, i, wide);
                }
            }
            const int64_t to = ((batch * rows + row) * kv_heads + kv) * size * bytes;
#pragma omp simd
            for (int64_t i = 0; i < size; i++) {
                store(grads[2 * s] + to, i, to_key[i], wide);
                store(grads[2 * s + 1] + to, i, to_value[i], wide);
            }
        }
#pragma omp simd
        for (int64_t i = 0; i < group * size; i++)
            store(grad_q + first * size * bytes, i, to_q[i], wide);
    }
}

/* pointers: q, then key and value of every step; strides: two for each of them. out and lse
 * [batches, rows, heads (, size)] hold the prefix' and become the joint ones; scores
 * [steps, batches, rows, heads]. */
void step_keys_forward(const char **pointers, const int64_t *strides, char *out, float *lse,
                 float *scores, int64_t steps, int64_t batches, int64_t rows, int64_t heads,
                 int64_t group, int64_t size, int64_t wide, int64_t threads) {
    Rows all[2 * STEPS + 1], keys[STEPS], values[STEPS];
    for (int64_t i = 0; i < 2 * steps + 1; i++) all[i] = (Rows){pointers[i], strides + 2 * i};
    for (int64_t s = 0; s < steps; s++) keys[s] = all[2 * s + 1], values[s] = all[2 * s + 2];
    const int64_t kv_bytes = heads / group * size * (wide ? 4 : 2);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t at = 0; at < batches * rows; at++) {
        if (at + 1 < batches * rows) prefetch(all + 1, 2 * steps, at + 1, rows, kv_bytes, wide);
#define JOIN(size, wide)                                                                        \
    join(all[0], keys, values, out, lse, scores, steps, at / rows, at % rows, rows, batches,    \
         heads, group, size, wide)
#define WIDE(size) JOIN(size, 1)
#define NARROW(size) JOIN(size, 0)
        if (wide) OF_SIZE(WIDE)
        else OF_SIZE(NARROW)
#undef JOIN
    }
}

/* pointers: q, then key and value of every step, then the gradient; strides likewise. */
void step_keys_backward(const char **pointers, const int64_t *strides, const float *lse,
                  const float *scores, const float *delta, char *grad_q, char **grads,
                  int64_t steps, int64_t batches, int64_t rows, int64_t heads, int64_t group,
                  int64_t size, int64_t wide, int64_t threads) {
    Rows all[2 * STEPS + 2], keys[STEPS], values[STEPS];
    for (int64_t i = 0; i < 2 * steps + 2; i++) all[i] = (Rows){pointers[i], strides + 2 * i};
    for (int64_t s = 0; s < steps; s++) keys[s] = all[2 * s + 1], values[s] = all[2 * s + 2];
    const int64_t kv_bytes = heads / group * size * (wide ? 4 : 2);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t at = 0; at < batches * rows; at++) {
        if (at + 1 < batches * rows) prefetch(all + 1, 2 * steps, at + 1, rows, kv_bytes, wide);
#define JOIN(size, wide)                                                                        \
    join_backward(all[0], keys, values, all[2 * steps + 1], lse, scores, delta, grad_q, grads,  \
                  steps, at / rows, at % rows, rows, batches, heads, group, size, wide)
        if (wide) OF_SIZE(WIDE)
        else OF_SIZE(NARROW)
#undef JOIN
    }
}
