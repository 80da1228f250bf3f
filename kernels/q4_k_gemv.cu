// y = W x of one token for a weight in Q4_K in rows. Method: q4_k_gemv.py.
//
// Compiled once per shape and configuration; the launcher defines:
//   BF16    0 1 (else float16)                SUPERS  super-blocks of a row
//   RAGGED  1: 8 do not divide the rows       WARPS   of a thread block
//   BLOCKS  of an SM                          AHEAD   units that a warp has on their way to its registers
//   KEPT    1: a warp's share of x stays in its registers; 0: in shared memory
//   EACH    tiles of a thread block           MORE    blocks that have one more
//
// A tile is 8 rows, a unit of it one super-block of each. A thread block has a range of tiles; each of its warps has the
// same units of every tile, and prepares its share of x once. Sums of a tile wait in shared memory until all are there.
//
// Lane 4 g + t holds pieces t and 4 + t of row g, 16 of 128 bytes, which belong to groups t / 2 and 2 + t / 2 of 64
// weights. Row g of operand A has their codes q + 16 q' and row g + 8 the high nibbles 16 q' of the same bytes; column n
// of operand B has the inputs of sub-block n where a lane's bytes are of its group, and zeros elsewhere. So one product
// sums 8 rows for the four sub-blocks of half a super-block; the other half has sums of its own, with the same operand B.

#include "q4_k.cuh"

constexpr u32 SUPER = 256, ROWS = 8, MEAN = (SUPERS + WARPS - 1) / WARPS;
constexpr u32 OWN = AHEAD < MEAN ? (MEAN + AHEAD - 1) / AHEAD * AHEAD : MEAN; // units of a warp in a tile
constexpr u32 TILES = AHEAD < OWN ? 1 : AHEAD / OWN, HELD = AHEAD < OWN ? AHEAD : TILES * OWN;
constexpr bool EVEN = WARPS * OWN == SUPERS; // else a warp has some units twice, the second time with an x of zeros
constexpr u32 TILE_CODES = ROWS * SUPERS * LINE, TILE_HEADERS = ROWS * SUPERS * HEADER;
constexpr u32 SUMS = ROWS * (WARPS | 1);                        // floats of a tile's sums
constexpr u32 SUMS_OF_X = SUPER * 2, SHARE = SUMS_OF_X + 8 * 4; // bytes of a super-block of x in shared memory

struct Unit { // what a lane has of it
    uint4 code[2], header;
};
struct Inputs { // what a lane needs of a super-block of x
    u32 word[8];  // operand B of the four words of a piece
    float sum[2]; // of sub-blocks 2 t and 2 t + 1
};

// Values 16 (t % 2) and on of sub-block g, scaled by `factor`: four neighbours as 0 2 and 1 3, the order of masked codes.
INLINE Inputs arranged(const uint4 value[2], float factor, u32 g, u32 t, bool mine) {
    Inputs to;
    float sum = 0;
    UNROLL for (int i = 0; i < 4; i++) {
        const u32 a = word_of(value[i / 2], 2 * (i % 2)), b = word_of(value[i / 2], 2 * (i % 2) + 1);
        const float v[4] = {to_float<BF16>(a & 0xFFFF) * factor, to_float<BF16>(a >> 16) * factor,
                            to_float<BF16>(b & 0xFFFF) * factor, to_float<BF16>(b >> 16) * factor};
        sum += (v[0] + v[1]) + (v[2] + v[3]);
        const u32 even = BF16 ? to_halves<0>(v[0], v[2]) : __byte_perm(a, b, 0x5410);
        const u32 odd = BF16 ? to_halves<0>(v[1], v[3]) : __byte_perm(a, b, 0x7632);
        to.word[2 * i] = mine ? even : 0, to.word[2 * i + 1] = mine ? odd : 0;
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum *= 1 / UNITS;
    UNROLL for (u32 i = 0; i < 2; i++) to.sum[i] = __shfl_sync(~0u, sum, 4 * (2 * t + i), 32);
    return to;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
q4_k_rows(const char *__restrict__ codes, const char *__restrict__ headers, const u16 *__restrict__ x,
          u16 *__restrict__ y, u32 N) {
    extern __shared__ __align__(128) char shared[]; // sums [tiles][WARPS | 1][8]; x unless KEPT
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const u32 begin = blockIdx.x * EACH + min(blockIdx.x, (u32)MORE), count = EACH + (blockIdx.x < (u32)MORE); // its tiles
    const u32 first = warp * SUPERS / WARPS, own_count = (warp + 1) * SUPERS / WARPS - first;
    float *sums = (float *)shared;
    char *own_x = shared + (EACH + (MORE > 0)) * SUMS * 4 + warp * OWN * SHARE;

    uint4 values[OWN][2]; // of x, which is requested before the weights
    UNROLL for (u32 own = 0; own < OWN; own++)
        UNROLL for (u32 i = 0; i < 2; i++) {
            values[own][i] = {0, 0, 0, 0};
            const u16 *from = x + (first + own) * SUPER + 32 * g + 16 * (t % 2) + 8 * i;
            if (EVEN || own < own_count) values[own][i] = load_early(from);
        }

    Unit held[HELD];
    const u64 policy = evict_first(), place = (u64)(begin * ROWS + g) * SUPERS + first;
    const char *from_codes = codes + place * LINE + t * 16, *from_headers = headers + place * HEADER;
    auto load = [&](u32 next, u32 unit) { // units are counted from those of tile `next`, where the pointers are
        const u32 later = unit / OWN, own = EVEN ? unit % OWN : min(unit % OWN, SUPERS - 1 - first);
        if (next + later >= count) return;
        const char *of_codes = from_codes + later * TILE_CODES + own * LINE;
        const char *of_headers = from_headers + later * TILE_HEADERS + own * HEADER;
        if (RAGGED) { // beyond the last row it is repeated, and dropped
            const u64 here = (u64)min((begin + next + later) * ROWS + g, N - 1) * SUPERS + first + own;
            of_codes = codes + here * LINE + t * 16, of_headers = headers + here * HEADER;
        }
        Unit &to = held[unit % HELD];
        UNROLL for (u32 half = 0; half < 2; half++) to.code[half] = load_past_l1(of_codes + half * LINE / 2, policy);
        to.header = __ldg((const uint4 *)of_headers);
    };
    UNROLL for (u32 unit = 0; unit < HELD; unit++) load(0, unit);

    Power power{1, 1};
    if (BF16) {
        u32 most = 0;
        UNROLL for (u32 own = 0; own < OWN; own++)
            UNROLL for (int i = 0; i < 8; i++) most = __vmaxu2(most, word_of(values[own][i / 4], i % 4) & 0x7FFF7FFF);
        power = power_of(most);
    }
    const bool mine = t / 2 == g / 2 % 2; // the lane's bytes are of the group of sub-block g
    Inputs inputs[KEPT ? OWN : 1];
    UNROLL for (u32 own = 0; own < OWN; own++) {
        const Inputs made = arranged(values[own], power.factor, g, t, mine);
        if (KEPT) {
            inputs[KEPT ? own : 0] = made;
            continue;
        }
        char *to = own_x + own * SHARE;
        if (mine)
            UNROLL for (u32 i = 0; i < 8; i += 4)
                store16(shared_address(to) + g * 64 + t % 2 * 32 + 4 * i,
                        uint4{made.word[i], made.word[i + 1], made.word[i + 2], made.word[i + 3]});
        if (g == 0)
            UNROLL for (u32 i = 0; i < 2; i++) ((float *)(to + SUMS_OF_X))[2 * t + i] = made.sum[i];
    }
    if (!KEPT) __syncwarp();
    auto inputs_of = [&](u32 own) {
        if (KEPT) return inputs[KEPT ? own : 0];
        Inputs read;
        const u32 from = shared_address(own_x) + own * SHARE;
        uint4 words[2] = {};
        UNROLL for (u32 i = 0; i < 2; i++) load16_if(words[i], from + g * 64 + t % 2 * 32 + 16 * i, mine);
        UNROLL for (u32 i = 0; i < 8; i++) read.word[i] = word_of(words[i / 4], i % 4);
        const uint2 both = load8(from + SUMS_OF_X + 8 * t);
        read.sum[0] = __uint_as_float(both.x), read.sum[1] = __uint_as_float(both.y);
        return read;
    };

    const Bits bits(t >= 2);
    const u32 spread = kept(t % 2 ? 0x4342 : 0x4140); // bytes of sub-blocks 2 t and 2 t + 1 as float16 subnormals
    auto sum_of = [&](const Unit &unit, const Inputs &in) { // of the lane's two sub-blocks, in units of 2^-48
        float c[2][4] = {};
        UNROLL for (int i = 0; i < 4; i++)
            UNROLL for (int half = 0; half < 2; half++) {
                const u32 word = word_of(unit.code[half], i), upper = upper_bytes(word);
                const u32 a[4] = {lower_bytes(word), high_nibbles(word), upper, high_nibbles(upper)};
                mma<0>(c[half], a, in.word[2 * i], in.word[2 * i + 1]);
            }
        const bool last = t >= 2; // the lane's sub-blocks are in the second half
        const float both = last ? c[1][0] : c[0][0], high = last ? c[1][2] : c[0][2];
        const float first_sum = both - high, second_sum = (last ? c[1][3] : c[0][3]) * (1.f / 16);
        const u32 scales = __byte_perm(bits.scales(unit.header), 0, spread);
        const u32 minima = __byte_perm(bits.minima(unit.header), 0, spread);
        const float product = half_to_float(scales & 0xFFFF) * first_sum + half_to_float(scales >> 16) * second_sum;
        const float less = half_to_float(minima & 0xFFFF) * in.sum[0] + half_to_float(minima >> 16) * in.sum[1];
        return half_to_float(unit.header.x & 0xFFFF) * product - half_to_float(unit.header.x >> 16) * less;
    };

#pragma unroll 1
    for (u32 next = 0; next < count; next += TILES) {
        UNROLL for (u32 tile = 0; tile < TILES; tile++) {
            if (next + tile >= count) break;
            float sum = 0;
            UNROLL for (u32 own = 0; own < OWN; own++) {
                const u32 unit = tile * OWN + own;
                sum += sum_of(held[unit % HELD], inputs_of(own));
                load(next, unit + HELD);
            }
            sum = sum * (UNITS * UNITS) * power.inverse;
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (t == 0) sums[(next + tile) * SUMS + warp * ROWS + g] = sum;
        }
        from_codes += TILES * TILE_CODES, from_headers += TILES * TILE_HEADERS;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < count * ROWS; i += 32 * WARPS) {
        float sum = 0;
        UNROLL for (int w = 0; w < WARPS; w++) sum += sums[i / ROWS * SUMS + w * ROWS + i % ROWS];
        const u32 row = begin * ROWS + i;
        if (!RAGGED || row < N) y[row] = to_half<BF16>(sum);
    }
}
