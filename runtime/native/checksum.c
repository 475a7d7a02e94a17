/* The checksum of runtime/codecs/checksum.py: the sum of (2i + 1) (w_i xor (w_i >> 32)) modulo 2^64. */
#include "codecs.h"

#include <stdint.h>
#include <string.h>

static uint64_t folded(const uint8_t *data, int64_t i)
{
    uint64_t word;
    memcpy(&word, data + 8 * i, 8);
    return (uint64_t)(2 * i + 1) * (word ^ (word >> 32));
}

#ifdef TACCL_VECTORS
#include <immintrin.h>

enum { MOST_WORDS = INT32_MAX }; /* whose factors have 32 bits */

/* Of the first count words, a multiple of 8: with factors of 32 bits the product is that with the lower half of a word,
 * and that with the upper half further up. */
__attribute__((target("avx2"))) static uint64_t quickly(const uint8_t *data, int64_t count)
{
    __m256i factors = _mm256_setr_epi64x(1, 3, 5, 7), low[2], high[2];
    const __m256i more = _mm256_set1_epi64x(8);
    for (int j = 0; j < 2; j++)
        low[j] = high[j] = _mm256_setzero_si256();
    for (int64_t i = 0; i < count; i += 8)
        for (int j = 0; j < 2; j++) {
            __m256i words = _mm256_loadu_si256((const __m256i *)(data + 8 * i + 32 * j));
            __m256i upper = _mm256_srli_epi64(words, 32);
            low[j] = _mm256_add_epi64(low[j], _mm256_mul_epu32(_mm256_xor_si256(words, upper), factors));
            high[j] = _mm256_add_epi64(high[j], _mm256_mul_epu32(upper, factors));
            factors = _mm256_add_epi64(factors, more);
        }
    uint64_t sums[4], above[4];
    _mm256_storeu_si256((__m256i *)sums, _mm256_add_epi64(low[0], low[1]));
    _mm256_storeu_si256((__m256i *)above, _mm256_add_epi64(high[0], high[1]));
    return sums[0] + sums[1] + sums[2] + sums[3] + ((above[0] + above[1] + above[2] + above[3]) << 32);
}
#endif

uint64_t taccl_checksum(const void *data, int64_t bytes)
{
    int64_t count = bytes / 8, i = 0;
    uint64_t sums[4] = {0, 0, 0, 0};
#ifdef TACCL_VECTORS
    if (count <= MOST_WORDS && taccl_vectors()) {
        i = count & -8;
        sums[0] = quickly(data, i);
    }
#endif
    for (; i + 4 <= count; i += 4)
        for (int64_t j = 0; j < 4; j++)
            sums[j] += folded(data, i + j);
    for (; i < count; i++)
        sums[0] += folded(data, i);
    return sums[0] + sums[1] + sums[2] + sums[3];
}
