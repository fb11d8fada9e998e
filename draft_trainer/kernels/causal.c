/* Causal attention with its log-sum-exp and the joint backward pass, in float32, a block of queries
 * at a time.
 *
 * Per key head, one after the other or one per thread: queries [rows, size] of all query heads of
 * a group, position after position, times scale * log2(e); keys and values [keys, size] and
 * transposed [size, keys]. size and keys are padded with zeros to multiples of 32; the last
 * `first + rows / group` of keys are real. Row r sees the keys before first + r / group + 1.
 */
#include "numbers.h"

#define BLOCK 64
#define WIDE 32
#define TALL 8

/* c [rows, WIDE] (+)= a [rows, depth] b [depth, WIDE], kept in registers. */
INLINE void tile(int rows, int64_t depth, const float *restrict a, int64_t a_row, int64_t a_depth,
                 const float *restrict b, int64_t b_row, float *restrict c, int64_t c_row, int add) {
    float sums[TALL][WIDE];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < WIDE; j++) sums[i][j] = add ? c[i * c_row + j] : 0.0f;
    for (int64_t k = 0; k < depth; k++)
        for (int i = 0; i < rows; i++) {
            const float x = a[i * a_row + k * a_depth];
#pragma omp simd
            for (int j = 0; j < WIDE; j++) sums[i][j] += x * b[k * b_row + j];
        }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < WIDE; j++) c[i * c_row + j] = sums[i][j];
}

/* c [rows, columns] (+)= a [rows, depth] b [depth, columns]; columns a multiple of WIDE. */
static void multiply(int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t a_row,
                     int64_t a_depth, const float *b, int64_t b_row, float *c, int64_t c_row,
                     int add) {
    for (int64_t j = 0; j < columns; j += WIDE) {
        int64_t i = 0;
        for (; i + TALL <= rows; i += TALL)
            tile(TALL, depth, a + i * a_row, a_row, a_depth, b + j, b_row, c + i * c_row + j, c_row,
                 add);
        for (; i < rows; i++)
            tile(1, depth, a + i * a_row, a_row, a_depth, b + j, b_row, c + i * c_row + j, c_row,
                 add);
    }
}

/* The number of keys that the last row of a block of queries sees, rounded up to WIDE. */
INLINE int64_t reach(int64_t first, int64_t last_row, int64_t group) {
    return (first + last_row / group + WIDE) / WIDE * WIDE;
}

/* out [heads, rows, size]; lse [heads, rows], in units of log 2; scratch [threads, BLOCK, keys]. */
void causal_forward(const float *q, const float *keys_t, const float *values, float *out,
                    float *lse, int64_t heads, int64_t rows, int64_t group, int64_t size,
                    int64_t keys, int64_t first, float *scratch, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t h = 0; h < heads; h++) {
        float *p = scratch + omp_get_thread_num() * BLOCK * keys;
        const float *k_t = keys_t + h * size * keys, *v = values + h * keys * size;
        for (int64_t start = 0; start < rows; start += BLOCK) {
            const int64_t count = start + BLOCK < rows ? BLOCK : rows - start;
            const int64_t seen = reach(first, start + count - 1, group);
            float *o = out + (h * rows + start) * size;
            float inverse[BLOCK];
            multiply(count, seen, size, q + (h * rows + start) * size, size, 1, k_t, keys, p, seen,
                     0);
            for (int64_t r = 0; r < count; r++) {
                float *row = p + r * seen, highest = -INFINITY, sum = 0.0f;
                const int64_t own = first + (start + r) / group + 1;
#pragma omp simd reduction(max : highest)
                for (int64_t j = 0; j < own; j++) highest = row[j] > highest ? row[j] : highest;
#pragma omp simd reduction(+ : sum)
                for (int64_t j = 0; j < own; j++) {
                    row[j] = exp2_of(row[j] - highest);
                    sum += row[j];
                }
                for (int64_t j = own; j < seen; j++) row[j] = 0.0f;
                lse[h * rows + start + r] = highest + log2f(sum);
                inverse[r] = 1.0f / sum;
            }
            multiply(count, size, seen, p, seen, 1, v, size, o, size, 0);
            for (int64_t r = 0; r < count; r++)
                for (int64_t j = 0; j < size; j++) o[r * size + j] *= inverse[r];
        }
    }
}

/* grad, q, grad_q [heads, rows, size]; the rest of keys and values [heads, keys, size], the sums
 * zeroed by the caller; scratch [threads, 2, BLOCK, keys]. The caller scales grad_q. */
void causal_backward(const float *grad, const float *q, const float *keys_t, const float *k,
                     const float *values_t, const float *delta, const float *lse, float *grad_q,
                     float *grad_k, float *grad_v, int64_t heads, int64_t rows, int64_t group,
                     int64_t size, int64_t keys, int64_t first, float *scratch, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t h = 0; h < heads; h++) {
        float *p = scratch + omp_get_thread_num() * 2 * BLOCK * keys, *d = p + BLOCK * keys;
        const int64_t of_keys = h * keys * size;
        for (int64_t start = 0; start < rows; start += BLOCK) {
            const int64_t count = start + BLOCK < rows ? BLOCK : rows - start;
            const int64_t seen = reach(first, start + count - 1, group);
            const int64_t of_rows = (h * rows + start) * size;
            multiply(count, seen, size, q + of_rows, size, 1, keys_t + of_keys, keys, p, seen, 0);
            multiply(count, seen, size, grad + of_rows, size, 1, values_t + of_keys, keys, d, seen,
                     0);
            for (int64_t r = 0; r < count; r++) {
                float *restrict row = p + r * seen, *restrict d_row = d + r * seen;
                const float total = lse[h * rows + start + r], offset = delta[h * rows + start + r];
                const int64_t own = first + (start + r) / group + 1;
#pragma omp simd
                for (int64_t j = 0; j < own; j++) {
                    row[j] = exp2_of(row[j] - total);
                    d_row[j] = row[j] * (d_row[j] - offset);
                }
                for (int64_t j = own; j < seen; j++) row[j] = d_row[j] = 0.0f;
            }
            multiply(count, size, seen, d, seen, 1, k + of_keys, size, grad_q + of_rows, size, 0);
            multiply(seen, size, count, d, 1, seen, q + of_rows, size, grad_k + of_keys, size, 1);
            multiply(seen, size, count, p, 1, seen, grad + of_rows, size, grad_v + of_keys, size, 1);
        }
    }
}
