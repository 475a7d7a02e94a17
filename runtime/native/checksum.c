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

uint64_t taccl_checksum(const void *data, int64_t bytes)
{
    int64_t count = bytes / 8, i = 0;
    uint64_t sums[4] = {0, 0, 0, 0};
    for (; i + 4 <= count; i += 4)
        for (int64_t j = 0; j < 4; j++)
            sums[j] += folded(data, i + j);
    for (; i < count; i++)
        sums[0] += folded(data, i);
    return sums[0] + sums[1] + sums[2] + sums[3];
}
