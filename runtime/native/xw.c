/* Tiles of the codec `xw`: the bytes of runtime/codecs/xw.py, which explains them, in a few passes.
 *
 * A decoder that finds something wrong only says so; the twin in Python then finds it again and has words for it.
 */
#include "xw.h"

#include <string.h>

enum { MOST_BITS = 6, FIRST_BITS = 2, SYMBOLS = 256, MARGIN = 4 << MOST_BITS };
enum { EXCEPTION_BITS = 28, COLD_BITS = 7, DEAR_BITS = 6, MOST_EXCEPTIONS = 0xFFFF };

_Static_assert(sizeof(struct work) <= 8 * TILE, "the scratch of a tile is too small");

static int64_t padded(int64_t count)
{
    return aligned(count, 64);
}

static int64_t sections(const struct entry *e, int64_t width, int64_t count, int64_t *starts)
{
    int64_t room = padded(e->kept);
    const int64_t sizes[SECTIONS] = {
        e->mode == ZERO_MAP ? padded(count) / 8 : 0,
        width == 4 ? 2 * room : 0,
        room,
        room / 8,
        e->bits * room / 8,
        aligned(room / 64, 8),
        aligned(e->sparse, 8),
        aligned(2 * e->exceptions, 8),
        aligned(e->exceptions, 8),
    };
    int64_t place = 0;
    for (int i = 0; i < SECTIONS; i++) {
        starts[i] = place;
        place += sizes[i];
    }
    return place;
}

/* Which window: runtime/codecs/plan.py. */

struct window {
    int64_t cost, base;
};

static struct window window_of(const int32_t *below, int64_t bits, int64_t count)
{
    int64_t width = (int64_t)2 << bits, first = MARGIN - 1 - width, best = -1, at = first;
    for (int64_t i = first; i < first + SYMBOLS + width; i++) {
        int64_t worth = EXCEPTION_BITS * (int64_t)below[i + 2 * width] - COLD_BITS * (int64_t)below[i + width] -
                        (EXCEPTION_BITS - COLD_BITS) * (int64_t)below[i];
        if (worth > best) {
            best = worth;
            at = i;
        }
    }
    int64_t hot = below[at + 2 * width] - below[at + width], cold = below[at + width] - below[at];
    int64_t sparse = count / 8 + 8 * cold * count / (count + 5 * cold);
    struct window found = {bits * count + sparse + EXCEPTION_BITS * (count - hot - cold), at - MARGIN + 1};
    return found;
}

static void choose_window(const int32_t *counts, int64_t count, struct entry *e)
{
    int32_t below[MARGIN + SYMBOLS + MARGIN];
    memset(below, 0, MARGIN * sizeof *below);
    int32_t sum = 0;
    for (int i = 0; i < SYMBOLS; i++)
        below[MARGIN + i] = sum += counts[i];
    for (int i = 0; i < MARGIN; i++)
        below[MARGIN + SYMBOLS + i] = (int32_t)count;
    int64_t bits = FIRST_BITS;
    struct window best = window_of(below, bits, count);
    for (int step = -1; step <= 1; step += 2)
        while (0 <= bits + step && bits + step <= MOST_BITS) {
            struct window tried = window_of(below, bits + step, count);
            if (tried.cost >= best.cost)
                break;
            bits += step;
            best = tried;
        }
    if (best.cost > DEAR_BITS * count) {
        bits = 0;
        best = window_of(below, 0, count);
        for (int64_t other = 1; other <= MOST_BITS; other++) {
            struct window tried = window_of(below, other, count);
            if (tried.cost < best.cost) {
                bits = other;
                best = tried;
            }
        }
    }
    e->base = best.base & (SYMBOLS - 1);
    e->bits = bits;
}

static int64_t sample_step(int64_t count)
{
    return (count >> 10) | 1;
}

static uint32_t word(const void *words, int64_t width, int64_t i)
{
    return width == 2 ? ((const uint16_t *)words)[i] : ((const uint32_t *)words)[i];
}

struct sample {
    int32_t counts[SYMBOLS];
    int64_t values, zeros;
};

static void take_sample(const void *words, int64_t width, int64_t count, struct sample *s)
{
    memset(s, 0, sizeof *s);
    for (int64_t i = 0; i < count; i += sample_step(count), s->values++) {
        uint32_t value = word(words, width, i);
        s->counts[value >> (width == 2 ? 7 : 23) & 0xFF]++;
        s->zeros += value == 0;
    }
}

/* Encoding. */

CLONES static void split_short(const uint16_t *words, int64_t count, uint16_t base, uint8_t *low, uint8_t *top)
{
    for (int64_t i = 0; i < count; i++) {
        uint16_t half = (uint16_t)(words[i] - base);
        low[i] = (uint8_t)half;
        top[i] = (uint8_t)(half >> 8);
    }
}

CLONES static void split_long(const uint32_t *words, int64_t count, uint16_t base, uint16_t *low16, uint8_t *low,
                              uint8_t *top)
{
    for (int64_t i = 0; i < count; i++) {
        uint16_t half = (uint16_t)((words[i] >> 16) - base);
        low16[i] = (uint16_t)words[i];
        low[i] = (uint8_t)half;
        top[i] = (uint8_t)(half >> 8);
    }
}

/* Fields of 4 and 2 bits: byte i holds the values i, i + s, ... In words of 8 bytes, of which no bit leaves its byte. */
CLONES static void pack_field(const uint8_t *top, int64_t room, int width, int low, uint8_t *field)
{
    int64_t words = room * width / 64;
    const uint64_t *from = (const uint64_t *)top;
    uint64_t *to = (uint64_t *)field;
    if (width == 4) {
        const uint64_t mask = UINT64_C(0x0F0F0F0F0F0F0F0F);
        for (int64_t i = 0; i < words; i++)
            to[i] = (from[i] & mask) | (from[i + words] & mask) << 4;
    } else {
        const uint64_t mask = UINT64_C(0x0303030303030303) << low;
        for (int64_t i = 0; i < words; i++)
            to[i] = (from[i] & mask) >> low | (from[i + words] & mask) >> low << 2 |
                    (from[i + 2 * words] & mask) >> low << 4 | (from[i + 3 * words] & mask) >> low << 6;
    }
}

/* 8 bytes to the bits number `bit` of each. */
static uint8_t gather(uint64_t bytes, int bit)
{
    return (uint8_t)(((bytes >> bit & UINT64_C(0x0101010101010101)) * UINT64_C(0x0102040810204080)) >> 56);
}

/* One bit of each byte, as a plane. */
static void plane_of(const uint8_t *top, int64_t room, int bit, uint8_t *plane)
{
    for (int64_t i = 0; i < room; i += 8) {
        uint64_t bytes;
        memcpy(&bytes, top + i, 8);
        plane[i / 8] = gather(bytes, bit);
    }
}

/* Where bytes have one of these bits. */
static int64_t find(const uint8_t *top, int64_t room, uint8_t mask, uint16_t *positions)
{
    int64_t count = 0;
    uint64_t wide = mask * UINT64_C(0x0101010101010101);
    for (int64_t i = 0; i < room; i += 32) {
        uint64_t bytes[4];
        memcpy(bytes, top + i, 32);
        if (((bytes[0] | bytes[1] | bytes[2] | bytes[3]) & wide) == 0)
            continue;
        for (int64_t j = i; j < i + 32; j++) {
            positions[count] = (uint16_t)j;
            count += (top[j] & mask) != 0;
        }
    }
    return count;
}

/* The non-zero bytes of a plane whose bits are turned round, and a map of them; how many there are. */
static int64_t squeeze(const uint8_t *plane, int64_t bytes, uint8_t *map, uint8_t *found)
{
    int64_t count = 0, first = 0;
#ifdef TACCL_VECTORS
    if (taccl_vectors()) {
        first = bytes & -16;
        count = taccl_xw_squeeze(plane, first, map, found);
    }
#endif
    for (int64_t i = first; i < bytes; i += 8) {
        uint64_t eight;
        memcpy(&eight, plane + i, 8);
        eight = ~eight;
        uint8_t used = 0;
        if (eight) {
            /* The top bit of each byte that is not 0. */
            uint64_t low = (eight & UINT64_C(0x7F7F7F7F7F7F7F7F)) + UINT64_C(0x7F7F7F7F7F7F7F7F);
            used = gather(low | eight, 7);
            for (uint8_t left = used; left; left &= (uint8_t)(left - 1))
                found[count++] = (uint8_t)(eight >> (8 * __builtin_ctz(left)));
        }
        map[i / 8] = used;
    }
    return count;
}

static void clear(uint8_t *wire, int64_t from, int64_t to)
{
    memset(wire + from, 0, (size_t)(to - from));
}

/* Cuts words into the low bytes, signs and dense planes of a tile, work->plane and work->top; gives how many are outside
 * the window, with work->positions. */
static int64_t split_plainly(const void *words, int64_t width, int64_t room, const struct entry *e, uint8_t *wire,
                             const int64_t *starts, struct work *work)
{
    uint8_t *low = wire + starts[LOW], *top = work->top, *field = wire + starts[DENSE];
    uint16_t base = (uint16_t)(e->base << 7);
    if (width == 2) {
        split_short(words, e->kept, base, low, top);
    } else {
        split_long(words, e->kept, base, (uint16_t *)(wire + starts[LOW16]), low, top);
        clear(wire, starts[LOW16] + 2 * e->kept, starts[LOW]);
    }
    clear(low, e->kept, room);
    memset(top + e->kept, 1 << e->bits, (size_t)(room - e->kept));
    plane_of(top, room, 7, wire + starts[SIGNS]);
    plane_of(top, room, (int)e->bits, work->plane);
    for (int width_of = 4, first = 0; width_of; width_of >>= 1)
        if (e->bits & width_of) {
            if (width_of == 1)
                plane_of(top, room, first, field);
            else
                pack_field(top, room, width_of, first, field);
            field += room * width_of / 8;
            first += width_of;
        }
    uint8_t beyond = beyond_window((int)e->bits);
    return beyond ? find(top, room, beyond, work->positions) : 0;
}

static int64_t split(const void *words, int64_t width, int64_t room, const struct entry *e, uint8_t *wire,
                     const int64_t *starts, struct work *work)
{
#ifdef TACCL_VECTORS
    if (room >= VECTOR_ROOM && taccl_vectors()) {
        if (e->kept < room) {
            /* Room is filled with values of which nothing but the bit of the hot window is set. */
            uint16_t filler = (uint16_t)((1 << (e->bits + 8)) + (e->base << 7));
            if (words != work->words)
                memcpy(work->words, words, (size_t)(width * e->kept));
            for (int64_t i = e->kept; i < room; i++)
                if (width == 2)
                    ((uint16_t *)work->words)[i] = filler;
                else
                    ((uint32_t *)work->words)[i] = (uint32_t)filler << 16;
            words = work->words;
        }
        return taccl_xw_split(words, width, room, e, wire, starts, work);
    }
#endif
    return split_plainly(words, width, room, e, wire, starts, work);
}

/* 1, and the entry; 0 where the tile would not be smaller than its values. wire: room for those. */
int taccl_xw_encode(const void *words, int64_t width, int64_t count, uint8_t *wire, void *scratch, struct entry *e)
{
    struct work *work = scratch;
    if (!count)
        return 0;
    struct sample sample;
    take_sample(words, width, count, &sample);
    memset(e, 0, sizeof *e);
    e->mode = CODED;
    e->kept = count;
    if (sample.zeros * (width == 2 ? 16 : 32) > sample.values) {
        e->mode = ZERO_MAP;
        e->kept = 0;
        for (int64_t i = 0; i < count; i++) {
            uint32_t value = word(words, width, i);
            if (width == 2)
                ((uint16_t *)work->words)[e->kept] = (uint16_t)value;
            else
                ((uint32_t *)work->words)[e->kept] = value;
            e->kept += value != 0;
        }
        take_sample(work->words, width, e->kept, &sample);
    }
    const void *kept = e->mode == ZERO_MAP ? work->words : words;
    if (e->kept)
        choose_window(sample.counts, sample.values, e);
    int64_t starts[SECTIONS], limit = aligned(count * width, 16), room = padded(e->kept);
    if (sections(e, width, count, starts) >= limit)
        return 0;
    if (e->mode == ZERO_MAP) {
        clear(wire, 0, starts[LOW16]);
        for (int64_t i = 0; i < count; i++)
            wire[i / 8] |= (uint8_t)((word(words, width, i) != 0) << (i & 7));
    }
    e->exceptions = split(kept, width, room, e, wire, starts, work);
    e->sparse = squeeze(work->plane, room / 8, work->map, work->found);
    int64_t end = sections(e, width, count, starts);
    e->bytes = aligned(end, 16);
    if (e->bytes >= limit || e->exceptions > MOST_EXCEPTIONS)
        return 0;

    memcpy(wire + starts[MAP], work->map, (size_t)(room / 64));
    clear(wire, starts[MAP] + room / 64, starts[SPARSE]);
    memcpy(wire + starts[SPARSE], work->found, (size_t)e->sparse);
    clear(wire, starts[SPARSE] + e->sparse, starts[POSITIONS]);
    memcpy(wire + starts[POSITIONS], work->positions, (size_t)(2 * e->exceptions));
    clear(wire, starts[POSITIONS] + 2 * e->exceptions, starts[TOPS]);
    for (int64_t i = 0; i < e->exceptions; i++)
        wire[starts[TOPS] + i] = work->top[work->positions[i]];
    clear(wire, starts[TOPS] + e->exceptions, e->bytes);
    return 1;
}

/* Decoding. */

CLONES static void join_short(const uint8_t *low, const uint8_t *top, int64_t count, uint16_t base, uint16_t *words)
{
    for (int64_t i = 0; i < count; i++)
        words[i] = (uint16_t)((top[i] << 8 | low[i]) + base);
}

CLONES static void join_long(const uint16_t *low16, const uint8_t *low, const uint8_t *top, int64_t count,
                             uint16_t base, uint32_t *words)
{
    for (int64_t i = 0; i < count; i++)
        words[i] = (uint32_t)(uint16_t)((top[i] << 8 | low[i]) + base) << 16 | low16[i];
}

/* The first field is written, a later one added. */
CLONES static void unpack_field(const uint8_t *field, int64_t room, int width, int low, uint8_t *top)
{
    int64_t words = room * width / 64;
    const uint64_t *from = (const uint64_t *)field;
    uint64_t *to = (uint64_t *)top;
    if (width == 4) {
        const uint64_t mask = UINT64_C(0x0F0F0F0F0F0F0F0F);
        for (int64_t i = 0; i < words; i++) {
            to[i] = from[i] & mask;
            to[i + words] = from[i] >> 4 & mask;
        }
        return;
    }
    const uint64_t mask = UINT64_C(0x0303030303030303);
    for (int part = 0; part < 4; part++)
        for (int64_t i = 0; i < words; i++) {
            uint64_t bits = (from[i] >> (2 * part) & mask) << low;
            to[part * words + i] = low ? to[part * words + i] | bits : bits;
        }
}

/* A bit to each of 8 bytes, 0 or 1. */
static uint64_t scatter(uint8_t bits)
{
    uint64_t spread = bits * UINT64_C(0x0101010101010101) & UINT64_C(0x8040201008040201);
    return (spread + UINT64_C(0x7F7F7F7F7F7F7F7F)) >> 7 & UINT64_C(0x0101010101010101);
}

/* The bits above the dense ones: the sign, whether the value is in the hot window, and a dense field of one bit. */
static void add_planes(const uint8_t *signs, const uint8_t *hot, int bits, const uint8_t *one, int single,
                       int64_t room, uint8_t *top)
{
    for (int64_t i = 0; i < room / 8; i++) {
        uint64_t eight;
        memcpy(&eight, top + 8 * i, 8);
        eight |= scatter(hot[i]) << bits | scatter(signs[i]) << 7;
        if (one)
            eight |= scatter(one[i]) << single;
        memcpy(top + 8 * i, &eight, 8);
    }
}

CLONES static int64_t ones(const uint8_t *bytes, int64_t count)
{
    int64_t found = 0;
    for (int64_t i = 0; i < count; i += 8) {
        uint64_t eight;
        memcpy(&eight, bytes + i, 8);
        found += __builtin_popcountll(eight);
    }
    return found;
}

/* Whether a bit from `from` on is set. */
static int any_from(const uint8_t *bytes, int64_t from, int64_t bits)
{
    for (int64_t i = from; i < bits; i++)
        if (bytes[i / 8] >> (i & 7) & 1)
            return 1;
    return 0;
}

/* The plane that `squeeze` has made smaller. */
static void expand(const uint8_t *map, int64_t bytes, const uint8_t *found, int64_t count, uint8_t *plane)
{
    const uint8_t *last = found + count;
    int64_t first = 0;
#ifdef TACCL_VECTORS
    if (taccl_vectors())
        first = taccl_xw_expand(map, bytes, &found, last, plane);
#endif
    for (int64_t i = first; i < bytes; i += 8) {
        memset(plane + i, 0xFF, 8);
        for (uint8_t left = map[i / 8]; left; left &= (uint8_t)(left - 1))
            plane[i + __builtin_ctz(left)] = found < last ? (uint8_t)~*found++ : 0xFF;
    }
}

/* Words, as if none were outside the window. */
static void join_plainly(const uint8_t *wire, const int64_t *starts, const struct entry *e, int64_t width,
                         int64_t room, struct work *work, void *words)
{
    uint8_t *top = work->top;
    const uint8_t *field = wire + starts[DENSE], *one = NULL, *low = wire + starts[LOW];
    int first = 0, single = 0;
    if (e->bits < 2)
        memset(top, 0, (size_t)room);
    for (int width_of = 4; width_of; width_of >>= 1)
        if (e->bits & width_of) {
            if (width_of == 1) {
                one = field;
                single = first;
            } else {
                unpack_field(field, room, width_of, first, top);
            }
            field += room * width_of / 8;
            first += width_of;
        }
    add_planes(wire + starts[SIGNS], work->plane, (int)e->bits, one, single, room, top);
    uint16_t base = (uint16_t)(e->base << 7);
    if (width == 2)
        join_short(low, top, e->kept, base, words);
    else
        join_long((const uint16_t *)(wire + starts[LOW16]), low, top, e->kept, base, words);
}

static void join(const uint8_t *wire, const int64_t *starts, const struct entry *e, int64_t width, int64_t room,
                 struct work *work, void *words)
{
#ifdef TACCL_VECTORS
    if (room >= VECTOR_ROOM && taccl_vectors()) {
        taccl_xw_join(wire, starts, e, width, room, work->plane, words);
        return;
    }
#endif
    join_plainly(wire, starts, e, width, room, work, words);
}

/* Whether the wire, of e->bytes, is one that an encoder could have written; then the words are decoded. */
int taccl_xw_decode(const uint8_t *wire, const struct entry *e, int64_t width, int64_t count, void *words,
                    void *scratch)
{
    struct work *work = scratch;
    int64_t room = padded(e->kept), starts[SECTIONS];
    if ((e->mode != CODED && e->mode != ZERO_MAP) || e->bits < 0 || e->bits > MOST_BITS || e->kept < 0 ||
        e->kept > count || (e->mode == CODED && e->kept != count) || e->sparse < 0 || e->sparse > room / 8 ||
        e->exceptions < 0 || e->exceptions > e->kept || count > TILE ||
        aligned(sections(e, width, count, starts), 16) != e->bytes)
        return 0;
    if (e->mode == ZERO_MAP &&
        (ones(wire, padded(count) / 8) != e->kept || any_from(wire, count, padded(count))))
        return 0;
    /* The map could change after it was counted, were the wire another process's. */
    const uint8_t *map = wire + starts[MAP], *found = wire + starts[SPARSE];
    int64_t map_bytes = starts[SPARSE] - starts[MAP];
    if (ones(map, map_bytes) != e->sparse || any_from(map, room / 8, 8 * map_bytes))
        return 0;
    const uint16_t *positions = (const uint16_t *)(wire + starts[POSITIONS]);
    for (int64_t i = 1; i < e->exceptions; i++)
        if (positions[i] <= positions[i - 1])
            return 0;
    if (e->exceptions && positions[e->exceptions - 1] >= e->kept)
        return 0;

    expand(map, room / 8, found, e->sparse, work->plane);
    void *target = e->mode == ZERO_MAP || e->kept < room ? (void *)work->words : words;
    join(wire, starts, e, width, room, work, target);
    const uint8_t *low = wire + starts[LOW], *tops = wire + starts[TOPS];
    for (int64_t i = 0; i < e->exceptions; i++) {
        /* They too could have changed, were the words another process's or in the wire itself. */
        int64_t at = *(const volatile uint16_t *)(positions + i);
        if (at >= e->kept)
            return 0;
        uint16_t half = (uint16_t)((tops[i] << 8 | low[at]) + (e->base << 7));
        if (width == 2)
            ((uint16_t *)target)[at] = half;
        else
            ((uint32_t *)target)[at] = (uint32_t)half << 16 | ((const uint16_t *)(wire + starts[LOW16]))[at];
    }
    if (e->mode == ZERO_MAP) {
        int64_t next = 0;
        for (int64_t i = 0; i < count; i++) {
            int set = wire[i / 8] >> (i & 7) & 1;
            if (width == 2)
                ((uint16_t *)words)[i] = set ? ((const uint16_t *)target)[next] : 0;
            else
                ((uint32_t *)words)[i] = set ? ((const uint32_t *)target)[next] : 0;
            next += set;
        }
    } else if (target != words) {
        memcpy(words, target, (size_t)(width * count));
    }
    return 1;
}
