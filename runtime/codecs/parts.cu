// Codecs whose tiles have one length: q8, fp8, bf16. A tile is cut into parts, with a thread block each, so that few
// tiles fill a device too. A warp takes SPAN values, each of its threads four side by side at a time. Compiled behind
// kernels.cu, with its parameters.
//
// A part adds its share of the tile's checksum to that of the others, in `space`: zeros before and after, 16 bytes a
// tile. The last part to come writes the entry, or compares with it. So decoders write values before the frame is
// known to be damaged; sizes were looked at before.

#define SPAN 512
#define PART 4096  // values of a part: PART_VALUES of device.py
#define QUADS (SPAN / 128)

struct alignas(16) Quad { float of[4]; };

__device__ inline u32 parts_of(u32 tile) { return (tile + PART - 1) / PART; }

// For one thread, of the last part of a tile: true, and the sum over all parts.
__device__ bool last_part(u64 mine, u32 index, u32 parts, u8* space, u64* sum) {
    mine = block_sum(mine);
    if (threadIdx.x) return false;
    u64* shared = (u64*)space + 2 * (u64)index;
    atomicAdd(shared, mine);
    __threadfence();
    if (atomicInc((u32*)(shared + 1), parts - 1) != parts - 1) return false;  // turns to 0 with the last one
    __threadfence();
    *sum = atomicExch(shared, 0ull);
    return true;
}

// A thread's four values of a quad; 0 behind the last one. left: of values from the first on. whole: all are there,
// and aligned.
__device__ inline Quad load_quad(const float* from, u32 left, bool whole) {
    if (whole) return *(const Quad*)from;
    Quad quad;
    for (u32 i = 0; i < 4; i++) quad.of[i] = i < left ? from[i] : 0.0f;
    return quad;
}

// Whether a span's quads can be moved 16 bytes at a time.
__device__ inline bool whole_span(const float* from, u32 left) { return left >= SPAN && (u64)from % 16 == 0; }

// A thread's quads of a span.
__device__ inline void load_span(Quad* quads, const float* from, u32 left) {
    u32 lane = threadIdx.x % 32;
    bool whole = whole_span(from, left);
#pragma unroll
    for (u32 q = 0; q < QUADS; q++) {
        u32 at = 128 * q + 4 * lane;
        quads[q] = load_quad(from + at, left > at ? left - at : 0, whole);
    }
}

template <bool Adds> __device__ inline void store_quad(float* to, Quad quad, u32 left, bool whole) {
    if (Adds) {
        Quad before = load_quad(to, left, whole);
        for (u32 i = 0; i < 4; i++) quad.of[i] = plus(before.of[i], quad.of[i]);
    }
    if (whole)
        *(Quad*)to = quad;
    else
        for (u32 i = 0; i < 4 && i < left; i++) to[i] = quad.of[i];
}

// What four bytes of each thread of a warp, side by side from a multiple of 8 bytes on, add to the checksum.
__device__ inline u64 summand_of_halves(u32 half, u32 offset) {
    u32 other = __shfl_xor_sync(EVERYONE, half, 1);
    return threadIdx.x % 2 ? 0 : summand(offset / 8, half | (u64)other << 32);
}

// ------------------------------------------------------------------------------------------- bytes and scales

struct Scale { u32 stored; float inverse; };

struct Q8 {
    enum { BLOCK = 256 };

    static __device__ Scale scale(float most, bool special) {
        float levels = special ? 125.0f : 127.0f, scale = 0, inverse = 0;
        if (most >= 0x1p-119f) {
            scale = over(most, levels);
            inverse = over(levels, most);
            if (bits_of(times(scale, levels)) >= 0x7f800000) scale = float_of(bits_of(scale) - 1);
        }
        return {bits_of(scale) | (special ? 0x80000000u : 0), inverse};
    }

    static __device__ u32 code(float value, float inverse) {
        u32 bits = bits_of(value), size = bits & 0x7fffffff;
        if (size == 0x7f800000) return bits >> 31 ? 0x100 - 126 : 126;
        if (size > 0x7f800000) return 0x80;
        return bits_of(plus(times(value, inverse), 12582912.0f)) & 0xff;
    }

    static __device__ float value(u32 byte, u32 scale) {
        int code = (signed char)byte;
        if (scale >> 31 && code == 126) return float_of(0x7f800000);
        if (scale >> 31 && code == -126) return float_of(0xff800000);
        if (scale >> 31 && code == -128) return float_of(0x7fc00000);
        return times((float)code, float_of(scale & 0x7fffffff));
    }
};

struct Fp8 {
    enum { BLOCK = 128 };

    static __device__ Scale scale(float most, bool) {
        if (!(most >= 0x1p-117f)) return {0, 0};
        return {bits_of(over(most, 448.0f)), over(448.0f, most)};
    }

    // _to_e4m3 of fp8.py; sizes are compared by their bits.
    static __device__ u32 code(float value, float inverse) {
        u32 bits = bits_of(value), sign = bits >> 31 << 7, normal = bits_of(0x1p-6f);
        if ((bits & 0x7fffffff) >= 0x7f800000) return sign | 0x7f;
        u32 size = least(bits_of(times(float_of(bits & 0x7fffffff), inverse)), bits_of(448.0f));
        u32 large = size > normal ? size : normal;
        large = (large + (large >> 20 & 1) + 0x7ffff - (120u << 23)) >> 20;
        return sign | ((large + bits_of(plus(float_of(least(size, normal)), 0x1p14f)) - 8) & 0xff);
    }

    static __device__ float value(u32 code, u32 scale) {
        u32 exponent = code >> 3 & 15, mantissa = code & 7, sign = code >> 7 << 31;
        if ((code & 0x7f) == 0x7f) return float_of(0x7fc00000 | sign);
        float size = exponent ? float_of((exponent + 120) << 23 | mantissa << 20) : times((float)mantissa, 0x1p-9f);
        return times(float_of(bits_of(size) | sign), float_of(scale));
    }
};

// Of a block of a warp's quads the largest finite size, for every thread, and whether there are others.
template <u32 Number> __device__ inline float largest_of(const Quad* quads, bool* special) {
    u32 largest = 0;
    for (u32 finite_only = 0;; finite_only++) {
        largest = 0;
        for (u32 q = 0; q < Number; q++)
            for (u32 i = 0; i < 4; i++) {
                u32 size = bits_of(quads[q].of[i]) & 0x7fffffff;
                if (size > largest && !(finite_only && size >= 0x7f800000)) largest = size;
            }
        for (u32 step = 16; step; step /= 2) {
            u32 other = __shfl_xor_sync(EVERYONE, largest, step);
            largest = other > largest ? other : largest;
        }
        if (finite_only || largest < 0x7f800000) {  // the same for all threads
            *special = finite_only;
            return float_of(largest);
        }
    }
}

// A tile: a scale for each BLOCK values, then a byte for each value; both padded with zeros to multiples of 16 bytes.
template <typename C> struct Scaled {
    enum { BLOCKS = SPAN / C::BLOCK, IN_BLOCK = C::BLOCK / 128 };

    static __device__ u32 start(u32 count) { return aligned(4 * ((count + C::BLOCK - 1) / C::BLOCK), 16); }
    static __device__ u32 bytes(u32 count) { return start(count) + aligned(count, 16); }

    static __device__ u64 encode(const float* from, u32 first, u32 count, u8* out) {
        u32 lane = threadIdx.x % 32, left = count - first, begin = start(count), size = bytes(count);
        u32 stored[BLOCKS];
        u64 sum = 0;
        Quad quads[QUADS];
        load_span(quads, from + first, left);
#pragma unroll
        for (u32 block = 0; block < BLOCKS; block++) {
            bool special;
            float most = largest_of<IN_BLOCK>(quads + IN_BLOCK * block, &special);
            Scale scale = C::scale(most, special);
            stored[block] = scale.stored;
#pragma unroll
            for (u32 q = IN_BLOCK * block; q < IN_BLOCK * (block + 1); q++) {
                u32 codes = 0, offset = begin + first + 128 * q + 4 * lane;
                for (u32 i = 0; i < 4; i++) codes |= C::code(quads[q].of[i], scale.inverse) << 8 * i;
                if (offset < size) *(u32*)(out + offset) = codes;
                sum += summand_of_halves(codes, offset);
            }
        }
        if (lane) return sum;
        u32 offset = first / C::BLOCK * 4;
#pragma unroll
        for (u32 block = 0; block < BLOCKS; block += 2, offset += 8) {
            u64 word = stored[block] | (u64)stored[block + 1] << 32;
            if (offset < begin) *(u64*)(out + offset) = word;
            sum += summand(offset / 8, word);
        }
        if (left <= SPAN)
            for (; offset < begin; offset += 8) *(u64*)(out + offset) = 0;
        return sum;
    }

    template <bool Adds> static __device__ u64 decode(float* to, u32 first, u32 count, const u8* in) {
        u32 lane = threadIdx.x % 32, left = count - first, begin = start(count), size = bytes(count);
        bool whole = whole_span(to + first, left);
        u64 sum = 0;
        u32 codes[QUADS];
#pragma unroll
        for (u32 q = 0; q < QUADS; q++) {
            u32 offset = begin + first + 128 * q + 4 * lane;
            codes[q] = offset < size ? *(const u32*)(in + offset) : 0;
        }
#pragma unroll
        for (u32 q = 0; q < QUADS; q++) {
            u32 at = 128 * q + 4 * lane;
            sum += summand_of_halves(codes[q], begin + first + at);
            if (at >= left) continue;
            u32 scale = ((const u32*)in)[(first + 128 * q) / C::BLOCK];
            Quad quad;
            for (u32 i = 0; i < 4; i++) quad.of[i] = C::value(codes[q] >> 8 * i & 0xff, scale);
            store_quad<Adds>(to + first + at, quad, left - at, whole);
        }
        if (lane) return sum;
        u32 offset = first / C::BLOCK * 4, end = left <= SPAN ? begin : offset + 4 * BLOCKS;
        for (; offset < end; offset += 8) sum += summand(offset / 8, *(const u64*)(in + offset));
        return sum;
    }
};

// ---------------------------------------------------------------------------------------------------- halves

struct Halves {
    static __device__ u32 bytes(u32 count) { return aligned(2 * count, 16); }

    static __device__ u64 encode(const float* from, u32 first, u32 count, u8* out) {
        u32 lane = threadIdx.x % 32, left = count - first, size = bytes(count);
        u64 sum = 0;
        Quad quads[QUADS];
        load_span(quads, from + first, left);
#pragma unroll
        for (u32 q = 0; q < QUADS; q++) {
            u32 offset = 2 * (first + 128 * q + 4 * lane);
            u64 word = 0;
            for (u32 i = 0; i < 4; i++) word |= (u64)to_bfloat16(quads[q].of[i]) << 16 * i;
            if (offset < size) *(u64*)(out + offset) = word;
            sum += summand(offset / 8, word);
        }
        return sum;
    }

    template <bool Adds> static __device__ u64 decode(float* to, u32 first, u32 count, const u8* in) {
        u32 lane = threadIdx.x % 32, left = count - first, size = bytes(count);
        bool whole = whole_span(to + first, left);
        u64 sum = 0, words[QUADS];
#pragma unroll
        for (u32 q = 0; q < QUADS; q++) {
            u32 offset = 2 * (first + 128 * q + 4 * lane);
            words[q] = offset < size ? *(const u64*)(in + offset) : 0;
        }
#pragma unroll
        for (u32 q = 0; q < QUADS; q++) {
            u32 at = 128 * q + 4 * lane;
            sum += summand((first + at) / 4, words[q]);
            if (at >= left) continue;
            Quad quad;
            for (u32 i = 0; i < 4; i++) quad.of[i] = float_of((u32)(words[q] >> 16 * i & 0xffff) << 16);
            store_quad<Adds>(to + first + at, quad, left - at, whole);
        }
        return sum;
    }
};

// --------------------------------------------------------------------------------------------------- kernels

// What this block's spans add to the checksum of its tile.
#define EACH_SPAN(work) \
    u32 parts = parts_of(tile), index = blockIdx.x / parts, here = values_of(count, tile, index); \
    u32 from = blockIdx.x % parts * PART, to = least(here, from + PART); \
    u64 mine = 0, sum; \
    for (u32 first = from + threadIdx.x / 32 * SPAN; first < to; first += WARPS * SPAN) mine += work; \
    if (!last_part(mine, index, parts, space, &sum)) return;

template <typename C> __device__ void encode_part(PARAMETERS) {
    const float* tile_values = (const float*)values;
    EACH_SPAN(C::encode(tile_values + (u64)index * tile, first, here, wire + index * stride))
    Entry entry = plain_entry(C::bytes(here), CODED, here);
    entry.checksum = sum;
    entries[index] = entry;
}

template <typename C, bool Adds> __device__ void decode_part(PARAMETERS) {
    FOLLOW_TASK
    float* tile_values = (float*)values;
    u64 step = C::bytes(tile);
    EACH_SPAN(C::template decode<Adds>(tile_values + (u64)index * tile, first, here, wire + stride + index * step))
    report(sum != entries[index].checksum ? DAMAGED : SOUND, index, status, task);
}

#define ARGUMENTS values, count, tile, wire, stride, entries, space, status, task
#define PART_CODEC(name, Codec) \
    KERNEL(name##_encode_4) { encode_part<Codec>(ARGUMENTS); } \
    KERNEL(name##_decode_4) { decode_part<Codec, false>(ARGUMENTS); } \
    KERNEL(name##_add_4) { decode_part<Codec, true>(ARGUMENTS); }

PART_CODEC(q8, Scaled<Q8>)
PART_CODEC(fp8, Scaled<Fp8>)
PART_CODEC(bf16, Halves)
