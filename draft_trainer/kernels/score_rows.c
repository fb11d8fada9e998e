/* Loss, metrics and gradient of logits against the policy: four passes over a row in the cache. */
#include "numbers.h"

enum { KL, TV, LK };
/* Entries summed in float32 before they are added to a sum in double. */
#define SPAN 4096
#define SMALLEST_ACCEPTANCE 1e-8f
#define SPANS(first, last, count) \
    for (int64_t first = 0, last; last = first + SPAN < count ? first + SPAN : count, first < count; first = last)

INLINE void score_row(void *logits, int64_t step_stride, const void *policy, float log_z,
                      float inverse_t, int64_t steps, int64_t vocab, int64_t target,
                      int64_t learns, float *restrict p, float *restrict q, double *scores,
                      int64_t score_stride, int64_t wide, int64_t wide_policy) {
    const float warm = inverse_t * LOG2E, shift = log_z * LOG2E;
    double mass_sum = 0.0;
    float highest_p = -1.0f;
    SPANS(a, b, vocab) {
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum) reduction(max : highest_p)
        for (int64_t v = a; v < b; v++) {
            float x = exp2_of(load(policy, v, wide_policy) * warm - shift);
            p[v] = x;
            sum += x;
            highest_p = x > highest_p ? x : highest_p;
        }
        mass_sum += sum;
    }
    const float mass = (float)mass_sum;
    int32_t likeliest = (int32_t)vocab - 1;
#pragma omp simd reduction(min : likeliest)
    for (int32_t v = 0; v < (int32_t)vocab; v++) {
        int32_t found = p[v] == highest_p ? v : (int32_t)vocab - 1;
        likeliest = found < likeliest ? found : likeliest;
    }
    for (int64_t step = 0; step < steps; step++) {
        void *z = (char *)logits + step * step_stride * (wide ? 4 : 2);
        float highest = -INFINITY;
#pragma omp simd reduction(max : highest)
        for (int64_t v = 0; v < vocab; v++) {
            float x = load(z, v, wide);
            highest = x > highest ? x : highest;
        }
        const int agrees = load(z, likeliest, wide) == highest;
        double total = 0.0, dot = 0.0, overlap = 0.0, below = 0.0;
        SPANS(a, b, vocab) {
            float sum = 0.0f, product = 0.0f;
#pragma omp simd reduction(+ : sum, product)
            for (int64_t v = a; v < b; v++) {
                float x = load(z, v, wide);
                /* Subtracted first: the difference of two large products would lose its digits. */
                q[v] = exp2_of((x - highest) * warm);
                sum += q[v];
                product += p[v] * x;
            }
            total += sum;
            dot += product;
        }
        const float inverse = (float)(1.0 / total);
        SPANS(a, b, vocab) {
            float sum = 0.0f, sum_below = 0.0f;
#pragma omp simd reduction(+ : sum, sum_below)
            for (int64_t v = a; v < b; v++) {
                float x = q[v] * inverse;
                q[v] = x;
                sum += x < p[v] ? x : p[v];
                sum_below += x < p[v] ? x : 0.0f;
            }
            overlap += sum;
            below += sum_below;
        }
        const double rate = overlap > SMALLEST_ACCEPTANCE ? overlap : SMALLEST_ACCEPTANCE;
        if (learns && target == KL) {
#pragma omp simd
            for (int64_t v = 0; v < vocab; v++) store(z, v, q[v] * mass - p[v], wide);
        } else if (learns) {
            const float share = (float)below, factor = target == LK ? (float)(1.0 / rate) : 1.0f;
#pragma omp simd
            for (int64_t v = 0; v < vocab; v++)
                store(z, v, q[v] * (share - (q[v] < p[v] ? 1.0f : 0.0f)) * factor, wide);
        }
        double *row = scores + step * score_stride;
        row[0] = target == KL   ? mass_sum * (highest * inverse_t + log(total)) - dot * inverse_t
                 : target == TV ? 1.0 - rate
                                : -log(rate);
        row[1] = agrees;
        row[2] = overlap;
        /* Comparisons with a NaN are false, so it would be lost above: restore it. */
        if (total != total) row[0] = row[2] = total;
        row[3] = 1.0 - mass_sum;
    }
}

/* logits [steps, rows, vocab] at step_stride elements, policy [rows, vocab], scores
 * [steps, rows, 4], scratch [threads, 2, vocab]. */
void score_rows(void *logits, int64_t step_stride, const void *policy, const float *log_z,
                const float *inverse_t, int64_t steps, int64_t rows, int64_t vocab, int64_t target,
                int64_t learns, int64_t wide, int64_t wide_policy, float *scratch, double *scores,
                int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        float *p = scratch + omp_get_thread_num() * 2 * vocab;
        char *z = (char *)logits + r * vocab * (wide ? 4 : 2);
        const char *y = (const char *)policy + r * vocab * (wide_policy ? 4 : 2);
#define ROW(wide, wide_policy)                                                                                \
    score_row(z, step_stride, y, log_z[r], inverse_t[r], steps, vocab, target, learns, p,        \
              p + vocab, scores + r * 4, rows * 4, wide, wide_policy)
        if (wide) ROW(1, wide_policy);
        else if (wide_policy) ROW(0, 1);
        else ROW(0, 0);
#undef ROW
    }
}
