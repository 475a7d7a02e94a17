/* What tiles of `xw` are cut into, and joined from, in one pass each: 32 values of each quarter at a time, because a
 * field of 2 bits has one value of each quarter in a byte. For processors with AVX2; xw.c has the plain loops.
 */
#include "xw.h"

#ifdef TACCL_VECTORS
#include <immintrin.h>
#include <string.h>

#define AVX2 __attribute__((target("avx2")))
#define INLINE AVX2 static inline __attribute__((always_inline))

enum { QUARTERS = 4, STEP = 32, LINE = 64 };

INLINE __m256i load(const void *from)
{
    return _mm256_loadu_si256(from);
}

INLINE void store(void *to, __m256i value)
{
    _mm256_storeu_si256(to, value);
}

/* The order that instructions on two halves of a register leave, put right. */
INLINE __m256i in_order(__m256i value)
{
    return _mm256_permute4x64_epi64(value, 0xD8);
}

INLINE __m256i shifted_left(__m256i value, int by)
{
    return _mm256_sll_epi16(value, _mm_cvtsi32_si128(by));
}

INLINE __m256i shifted_right(__m256i value, int by)
{
    return _mm256_srl_epi16(value, _mm_cvtsi32_si128(by));
}

/* Have what lies there brought to the caches: as a rule the next tile, while this one is worked on. For values of 2
 * bytes: two tiles of longer ones, and what they are coded to, are more than inner caches hold. */
INLINE void fetch(const uint8_t *from, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i += LINE)
        __builtin_prefetch(from + i);
}

/* One bit of each byte. */
INLINE void store_plane(uint8_t *plane, __m256i bytes, int bit)
{
    uint32_t bits = (uint32_t)_mm256_movemask_epi8(shifted_left(bytes, 7 - bit));
    memcpy(plane, &bits, 4);
}

/* 32 values without the base: their low bytes, and the bytes above, which are returned. */
INLINE __m256i split(const uint8_t *words, int64_t width, int64_t at, __m256i base, uint8_t *low16, uint8_t *low)
{
    const __m256i byte = _mm256_set1_epi16(0xFF);
    __m256i halves[2];
    for (int i = 0; i < 2; i++) {
        const uint8_t *from = words + width * (at + 16 * i);
        if (width == 2) {
            halves[i] = load(from);
        } else {
            const __m256i half = _mm256_set1_epi32(0xFFFF);
            __m256i one = load(from), two = load(from + 32);
            halves[i] = in_order(_mm256_packus_epi32(_mm256_srli_epi32(one, 16), _mm256_srli_epi32(two, 16)));
            store(low16 + 2 * (at + 16 * i),
                  in_order(_mm256_packus_epi32(_mm256_and_si256(one, half), _mm256_and_si256(two, half))));
        }
        halves[i] = _mm256_sub_epi16(halves[i], base);
    }
    store(low + at, in_order(_mm256_packus_epi16(_mm256_and_si256(halves[0], byte),
                                                 _mm256_and_si256(halves[1], byte))));
    return in_order(_mm256_packus_epi16(_mm256_srli_epi16(halves[0], 8), _mm256_srli_epi16(halves[1], 8)));
}

/* The field of 4 bits of the tops of all quarters, that of 2 bits from bit `from` on. */
INLINE void store_four(const __m256i *tops, int64_t quarter, uint8_t *field)
{
    const __m256i mask = _mm256_set1_epi8(0x0F);
    for (int i = 0; i < 2; i++)
        store(field + i * quarter, _mm256_or_si256(_mm256_and_si256(tops[i], mask),
                                                   _mm256_slli_epi16(_mm256_and_si256(tops[i + 2], mask), 4)));
}

INLINE void store_two(const __m256i *tops, int from, uint8_t *field)
{
    const __m256i mask = _mm256_set1_epi8(0x03);
    __m256i all = _mm256_setzero_si256();
    for (int q = QUARTERS - 1; q >= 0; q--)
        all = _mm256_or_si256(_mm256_slli_epi16(all, 2), _mm256_and_si256(shifted_right(tops[q], from), mask));
    store(field, all);
}

INLINE int64_t split_all(const uint8_t *words, int64_t width, int64_t room, const struct entry *e, uint8_t *wire,
                         const int64_t *starts, struct work *work)
{
    const int64_t quarter = room / QUARTERS;
    const int bits = (int)e->bits, four = bits & 4, two = bits & 2, one = bits & 1;
    uint8_t *signs = wire + starts[SIGNS], *field = wire + starts[DENSE];
    uint8_t *second = field + (four ? room / 2 : 0), *third = second + (two ? room / 4 : 0);
    const __m256i base = _mm256_set1_epi16((int16_t)(e->base << 7));
    const __m256i beyond = _mm256_set1_epi8((char)beyond_window(bits)), zero = _mm256_setzero_si256();
    int64_t found[QUARTERS] = {0};

    for (int64_t step = 0, done = 0; done < quarter; step += STEP) {
        /* The last step goes over values of the one before where a quarter is not of whole steps. */
        int64_t i = step + STEP <= quarter ? step : quarter - STEP;
        __m256i tops[QUARTERS];
        for (int q = 0; q < QUARTERS; q++) {
            int64_t at = q * quarter + i;
            if (width == 2)
                fetch(words + width * (room + at), width * STEP);
            __m256i top = split(words, width, at, base, wire + starts[LOW16], wire + starts[LOW]);
            tops[q] = top;
            uint32_t sign = (uint32_t)_mm256_movemask_epi8(top);
            memcpy(signs + at / 8, &sign, 4);
            store_plane(work->plane + at / 8, top, bits);
            if (one)
                store_plane(third + at / 8, top, bits - 1);
            __m256i outside = _mm256_and_si256(top, beyond);
            if (!_mm256_testz_si256(outside, outside)) {
                uint32_t which = ~(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(outside, zero));
                store(work->top + at, top);
                for (which &= ~UINT32_C(0) << (done - i); which; which &= which - 1)
                    work->positions[q * quarter + found[q]++] = (uint16_t)(at + __builtin_ctz(which));
            }
        }
        if (four)
            store_four(tops, quarter, field + i);
        if (two)
            store_two(tops, four, second + i);
        done = i + STEP;
    }
    int64_t count = found[0];
    for (int q = 1; q < QUARTERS; q++) {
        memmove(work->positions + count, work->positions + q * quarter, (size_t)found[q] * sizeof *work->positions);
        count += found[q];
    }
    return count;
}

AVX2 int64_t taccl_xw_split(const void *words, int64_t width, int64_t room, const struct entry *e, uint8_t *wire,
                            const int64_t *starts, struct work *work)
{
    return width == 2 ? split_all(words, 2, room, e, wire, starts, work)
                      : split_all(words, 4, room, e, wire, starts, work);
}

/* Of 4 bytes those whose bit is set, one behind the other, and the way back, where the others get 0. */
#define BYTES(a, b, c, d) ((uint32_t)(uint8_t)(a) | (uint32_t)(uint8_t)(b) << 8 | (uint32_t)(uint8_t)(c) << 16 | \
                           (uint32_t)(uint8_t)(d) << 24)
static const uint32_t CLOSED_UP[16] = {
    BYTES(-1, -1, -1, -1), BYTES(0, -1, -1, -1), BYTES(1, -1, -1, -1), BYTES(0, 1, -1, -1),
    BYTES(2, -1, -1, -1), BYTES(0, 2, -1, -1), BYTES(1, 2, -1, -1), BYTES(0, 1, 2, -1),
    BYTES(3, -1, -1, -1), BYTES(0, 3, -1, -1), BYTES(1, 3, -1, -1), BYTES(0, 1, 3, -1),
    BYTES(2, 3, -1, -1), BYTES(0, 2, 3, -1), BYTES(1, 2, 3, -1), BYTES(0, 1, 2, 3),
};
static const uint32_t OPENED[16] = {
    BYTES(-1, -1, -1, -1), BYTES(0, -1, -1, -1), BYTES(-1, 0, -1, -1), BYTES(0, 1, -1, -1),
    BYTES(-1, -1, 0, -1), BYTES(0, -1, 1, -1), BYTES(-1, 0, 1, -1), BYTES(0, 1, 2, -1),
    BYTES(-1, -1, -1, 0), BYTES(0, -1, -1, 1), BYTES(-1, 0, -1, 1), BYTES(0, 1, -1, 2),
    BYTES(-1, -1, 0, 1), BYTES(0, -1, 1, 2), BYTES(-1, 0, 1, 2), BYTES(0, 1, 2, 3),
};

INLINE __m128i four_of(__m128i bytes, uint32_t order)
{
    return _mm_shuffle_epi8(bytes, _mm_cvtsi32_si128((int)order));
}

AVX2 int64_t taccl_xw_squeeze(const uint8_t *plane, int64_t bytes, uint8_t *map, uint8_t *found)
{
    int64_t count = 0;
    for (int64_t i = 0; i < bytes; i += 16) {
        __m128i turned = _mm_xor_si128(_mm_loadu_si128((const __m128i *)(plane + i)), _mm_set1_epi8(-1));
        uint16_t used = (uint16_t)~_mm_movemask_epi8(_mm_cmpeq_epi8(turned, _mm_setzero_si128()));
        memcpy(map + i / 8, &used, 2);
        for (int part = 0; part < 4; part++) {
            uint32_t which = used >> (4 * part) & 0xF;
            int32_t four = _mm_cvtsi128_si32(four_of(turned, CLOSED_UP[which]));
            memcpy(found + count, &four, 4);
            count += __builtin_popcount(which);
            turned = _mm_srli_si128(turned, 4);
        }
    }
    return count;
}

AVX2 int64_t taccl_xw_expand(const uint8_t *map, int64_t bytes, const uint8_t **found, const uint8_t *last,
                             uint8_t *plane)
{
    int64_t i = 0;
    const uint8_t *next = *found;
    for (; i + 16 <= bytes && last - next >= 16; i += 16) {
        uint16_t used;
        memcpy(&used, map + i / 8, 2);
        for (int part = 0; part < 4; part++) {
            uint32_t which = used >> (4 * part) & 0xF;
            int32_t four;
            memcpy(&four, next, 4);
            four = ~_mm_cvtsi128_si32(four_of(_mm_cvtsi32_si128(four), OPENED[which]));
            memcpy(plane + i + 4 * part, &four, 4);
            next += __builtin_popcount(which);
        }
    }
    *found = next;
    return i;
}

/* 32 bits to as many bytes: `value` where a bit is set. */
INLINE __m256i spread(const uint8_t *plane, __m256i value)
{
    const __m256i which = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bits = _mm256_set1_epi64x((int64_t)0x8040201008040201);
    int32_t word;
    memcpy(&word, plane, 4);
    __m256i bytes = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(word), which), bits);
    return _mm256_and_si256(_mm256_cmpeq_epi8(bytes, bits), value);
}

/* 32 values of their low bytes and the bytes above. */
INLINE void join(const uint8_t *low16, const uint8_t *low, __m256i top, int64_t width, int64_t at, __m256i base,
                 uint8_t *words)
{
    __m256i bottom = in_order(load(low + at));
    top = in_order(top);
    for (int i = 0; i < 2; i++) {
        __m256i half = i ? _mm256_unpackhi_epi8(bottom, top) : _mm256_unpacklo_epi8(bottom, top);
        half = _mm256_add_epi16(half, base);
        uint8_t *to = words + width * (at + 16 * i);
        if (width == 2) {
            store(to, half);
        } else {
            __m256i rest = in_order(load(low16 + 2 * (at + 16 * i)));
            half = in_order(half);
            store(to, _mm256_unpacklo_epi16(rest, half));
            store(to + 32, _mm256_unpackhi_epi16(rest, half));
        }
    }
}

INLINE void join_all(const uint8_t *wire, const int64_t *starts, const struct entry *e, int64_t width, int64_t room,
                     const uint8_t *plane, uint8_t *words)
{
    const int64_t quarter = room / QUARTERS;
    const int bits = (int)e->bits, four = bits & 4, two = bits & 2, one = bits & 1;
    const uint8_t *signs = wire + starts[SIGNS], *field = wire + starts[DENSE];
    const uint8_t *second = field + (four ? room / 2 : 0), *third = second + (two ? room / 4 : 0);
    const __m256i base = _mm256_set1_epi16((int16_t)(e->base << 7));
    const __m256i sign = _mm256_set1_epi8((char)0x80), hot = _mm256_set1_epi8((char)(1 << bits));
    const __m256i single = _mm256_set1_epi8((char)(one ? 1 << (bits - 1) : 0));
    const __m256i fours = _mm256_set1_epi8(0x0F), twos = _mm256_set1_epi8(0x03);
    const int64_t share = width == 2 ? e->bytes * STEP / quarter : 0;
    const uint8_t *next = wire + e->bytes;

    for (int64_t step = 0; step < quarter; step += STEP, next += share) {
        fetch(next, share);
        int64_t i = step + STEP <= quarter ? step : quarter - STEP;
        for (int q = 0; q < QUARTERS; q++) {
            int64_t at = q * quarter + i;
            __m256i top = _mm256_or_si256(spread(signs + at / 8, sign), spread(plane + at / 8, hot));
            if (four) {
                __m256i part = load(field + i + (q & 1) * quarter);
                top = _mm256_or_si256(top, _mm256_and_si256(q & 2 ? _mm256_srli_epi16(part, 4) : part, fours));
            }
            if (two) {
                __m256i part = _mm256_and_si256(shifted_right(load(second + i), 2 * q), twos);
                top = _mm256_or_si256(top, shifted_left(part, four));
            }
            if (one)
                top = _mm256_or_si256(top, spread(third + at / 8, single));
            join(wire + starts[LOW16], wire + starts[LOW], top, width, at, base, words);
        }
    }
}

AVX2 void taccl_xw_join(const uint8_t *wire, const int64_t *starts, const struct entry *e, int64_t width,
                        int64_t room, const uint8_t *plane, void *words)
{
    if (width == 2)
        join_all(wire, starts, e, 2, room, plane, words);
    else
        join_all(wire, starts, e, 4, room, plane, words);
}
#endif
