/* The checksum of runtime/codecs/checksum.py: the sum of (2i + 1) (w_i xor (w_i >> 32)) modulo 2^64. */
#include "codecs.h"

#include <stdint.h>

uint64_t taccl_checksum(const void *data, int64_t bytes)
{
    const uint64_t *words = data;
    int64_t count = bytes / 8, i = 0;
    uint64_t sums[4] = {0, 0, 0, 0};
    for (; i + 4 <= count; i += 4)
        for (int64_t j = 0; j < 4; j++)
            sums[j] += (uint64_t)(2 * (i + j) + 1) * (words[i + j] ^ (words[i + j] >> 32));
    uint64_t sum = sums[0] + sums[1] + sums[2] + sums[3];
    for (; i < count; i++)
        sum += (uint64_t)(2 * i + 1) * (words[i] ^ (words[i] >> 32));
    return sum;
}
