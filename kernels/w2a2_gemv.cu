// y[m, n] = f[n] sum_g s_w[n, g] s_x[m, g] sum_{k in g} (q_w[n, k] - z_w[n, g]) (q_x[m, k] - z_x[m, g]), 2 bits each, in
// groups of 32. See w2a2_gemv.py, and w2a2_format.py for the units of the weight.
//
// Compiled once per shape and configuration; the launcher defines:
//   G       groups of 32 columns                     TOKENS  1..4
//   X       type of x: 0 fp16, 1 bf16, 2 float32     READY   x is quantized beforehand: x_codes, x_scales, x_zeros
//   GATHER  columns of x by `index`                  REAL    zeros are float16
//   LAYERS  that read columns of their own, 1 to 3   LAYER_TILES, LAYER_BLOCKS   of each one, 20 bits a layer
//   WARPS   that multiply                            BLOCKS  of an SM
//   STAGES  of the ring that bulk copies fill; 0: weights are loaded straight into registers (bulk: 9.0 and later)
//   TILES   of 8 rows in a stage, or that a warp has on their way to its registers
//   KEPT    1: what a warp needs of x of PASS tokens stays in its registers; 0: in shared memory
//   PASS    tokens at a time; fewer than TOKENS where the stages hold all weights of a thread block
//   MOST    tiles of a thread block at most          SPLIT   blocks of a cluster, which share the columns (9.0 and later)
//
// A thread block has a range of tiles, one after the other in memory; each of its warps has the same units of every tile,
// and quantizes its share of x once. Sums of a tile wait in shared memory until all are there.
//
// Operand A of the binary mma m16n8k256 is 8 rows in two bit planes: registers of row g hold plane 0, those of row g + 8
// plane 1. Operand B has one word, a plane of a group of x, in each of its 8 columns, and zeros: a diagonal, so that C
// has the bit counts of 8 groups and nothing is unpacked. Two such products are a unit; lane 4 g + t has row g and groups
// 4 t to 4 t + 3, and gets the counts of these very groups. A count is read as a subnormal float, count * 2^-149.
//
// Of several tokens it is m16n8k128: 4 groups of two tokens are its columns, so that half as many bits are multiplied
// for as many counts, and neighbouring registers of C belong to two tokens.
//
// The zero point of x costs nothing: q - z = (x0 - z0) + 2 (x1 - z1), where x_b - 1 = -(1 - x_b). A plane whose zero bit
// is 1 is complemented, and its factor changes its sign.
#include "ptx.cuh"

constexpr u32 UNITS = (G + 15) / 16, SHARE = (UNITS + SPLIT - 1) / SPLIT; // of a tile, and of these a block's
constexpr u32 OWN = (SHARE + WARPS - 1) / WARPS;                          // a warp's
constexpr u32 SCALES_AT = 1024, ZEROS_AT = SCALES_AT + 128, UNIT = ZEROS_AT + (REAL ? 256 : 32), TILE = UNITS * UNIT;
constexpr u32 PIECE = SHARE * UNIT; // of a tile in a stage
INLINE u32 of_layer(u64 all, u32 layer) { return (u32)(all >> 20 * layer) & 0xFFFFF; }
constexpr bool AGAIN = STAGES && MOST > STAGES * TILES; // stages are used more than once: a warp more refills them
constexpr u32 THREADS = 32 * (WARPS + AGAIN), SUMS = 8 * (WARPS | 1); // floats of a tile's sums of a token
constexpr u32 AT_ONCE = TILES % 2 ? 1 : 2;                                   // tiles that share what is read of x
constexpr bool PAIRED = TOKENS > 1;   // two tokens are multiplied at a time
constexpr u32 PAIRS = (PASS + 1) / 2; // of them
constexpr float UP = 0x1p90f, DOWN = 0x1p59f; // sums of counts * UP are multiples of 2^-59

INLINE u32 at(const uint4 &v, u32 i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
INLINE void put(uint4 &v, u32 i, u32 word) { (i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w) = word; }

struct Unit { // what a lane has of 8 rows and 16 groups
    uint4 pair[2]; // of groups: planes 0 and 1 of the first, of the second
    u32 scale, zero[REAL ? 2 : 1];
};
struct Factors { // of a lane's groups of a token: of both planes' counts, of the weight's zero
    alignas(16) float first[4], second[4], third[4];
};
struct One { // what a lane needs of 16 groups of x of a single token
    Factors of;
    u32 word[2][2][2]; // operand B, of pair of groups and plane
};
struct Two { // the same of two tokens
    Factors of[2];
    u32 word[4][2]; // operand B, of group of the lane and plane
};

// ---- x. Two lanes share a group where a warp has a single unit of x; else a lane has a whole one, of one of two units.

constexpr u32 LANES = OWN * TOKENS > 1 ? 1 : 2, COLUMNS = 32 / LANES, TOGETHER = 2 / LANES; // of a group; of a lane; units
constexpr u32 SIZE = X == 2 ? 4 : 2, WORDS = COLUMNS * SIZE / 4;                            // bytes of a value; of a lane

struct Columns {
    uint4 word[WORDS / 4];
};
INLINE Columns columns_of(const char *token, u32 group, u32 lane) { // 0 past the last group
    Columns v = {};
    if (group < G) {
        const char *first = token + (group * 32 + (LANES == 2 ? lane % 2 * 16 : 0)) * SIZE;
        UNROLL for (u32 i = 0; i < WORDS / 4; i++) v.word[i] = load_early(first + 16 * i);
    }
    return v;
}

// By `index` a warp takes the 512 columns of a unit as they are in memory, four neighbours a lane, and passes them on in
// shared memory to the lanes whose groups they are.
constexpr u32 FOURS = GATHER ? 4 : 0; // neighbours that a lane takes of a unit
struct Places {
    uint4 word[FOURS + 1];
};
INLINE Places places_of(const int *index, u32 unit, u32 lane, u32 K) { // of columns past the last one K, as where x is 0
    Places places;
    UNROLL for (u32 i = 0; i < FOURS; i++) {
        const u32 column = 512 * unit + 128 * i + 4 * lane;
        places.word[i] = {K, K, K, K};
        if (column < 32 * G) places.word[i] = load_early(index + column);
    }
    return places;
}
INLINE void gather(u32 to, const char *token, const Places &places, u32 lane, u32 K) {
    UNROLL for (u32 i = 0; i < FOURS; i++) {
        uint4 four = {};
        UNROLL for (u32 j = 0; j < 4; j++) {
            const u32 place = at(places.word[i], j), part = 16 * (SIZE == 2 ? j % 2 : 0), word = j * SIZE / 4;
            const u32 value = load_early_if<SIZE>(token + (u64)place * SIZE, place < K);
            put(four, word, at(four, word) | value << part);
        }
        const u32 column = 128 * i + 4 * lane;
        if (SIZE == 2) store8(to + 2 * column, uint2{four.x, four.y});
        else store16(to + 4 * column, four);
    }
}

struct Group { // of a token, in every lane that has columns of it
    u32 plane[2];
    float first, second, third;
};
INLINE Group factors_of(u32 plane0, u32 plane1, float scale, u32 zero, u32 group) {
    const float sum = (float)((int)__popc(plane0) + 2 * (int)__popc(plane1) - 32 * (int)zero), up = scale * UP;
    // Zeros that are codes are masked where they are: as subnormals that are 4^(group % 4) times as large.
    const float third = REAL ? scale * (1 / DOWN) : up * __uint_as_float((127 - 2 * (group % 4)) << 23);
    return {{zero & 1 ? ~plane0 : plane0, zero & 2 ? ~plane1 : plane1}, zero & 1 ? -up : up, zero & 2 ? -2 * up : 2 * up,
            -sum * third};
}

// The least float whose quotient by s, rounded, is c or more: c s less half a unit in the last place of c, rounded up.
INLINE float threshold(float s, float c) {
    const float size = c < 0 ? -c : c, half = size > 2 ? 0x1p-23f : size > 1 ? 0x1p-24f : c < 0 ? 0x1p-25f : 0x1p-26f;
    return __fmaf_ru(s, c, -(s * half));
}
// On the min-max grid that includes 0, as quantize_2bit does: a code is how many borders a value reaches. A NaN makes
// `high` one, and with it the group's factors and the token's sums.
INLINE Group quantized(const Columns &v, u32 group, u32 lane) {
    float low = 0, high = 0;
    if (X == 2) {
        UNROLL for (u32 i = 0; i < WORDS; i++) {
            const float value = __uint_as_float(at(v.word[i / 4], i % 4));
            low = fminf(low, value), high = most(high, value);
        }
    } else {
        u32 lows = 0, highs = 0;
        UNROLL for (u32 i = 0; i < WORDS; i++) {
            const u32 two = at(v.word[i / 4], i % 4);
            lows = least<X == 1>(lows, two), highs = most<X == 1>(highs, two);
        }
        low = fminf(to_float<X == 1>(lows & 0xFFFF), to_float<X == 1>(lows >> 16));
        high = most(to_float<X == 1>(highs & 0xFFFF), to_float<X == 1>(highs >> 16));
    }
    if (LANES == 2) {
        low = fminf(low, __shfl_xor_sync(~0u, low, 1));
        high = most(high, __shfl_xor_sync(~0u, high, 1));
    }
    float scale = __fdiv_rn(high - low, 3.0f);
    if (scale == 0) scale = 1;
    float reached[6]; // by values whose quotients are -5/2, -3/2 ... 5/2
    UNROLL for (int i = 0; i < 6; i++) reached[i] = threshold(scale, i - 2.5f);
    const bool above[3] = {-low >= reached[3], -low >= reached[4], -low >= reached[5]};
    const u32 zero = above[0] + above[1] + above[2];
    float border[3]; // from which on a code is 1, 2, 3
    UNROLL for (int i = 0; i < 3; i++)
        border[i] = above[2] ? reached[i] : above[1] ? reached[i + 1] : above[0] ? reached[i + 2] : reached[i + 3];
    u32 part[2][2] = {}; // of a plane, 16 bits
    if (X == 2) {
        UNROLL for (u32 i = 0; i < WORDS; i++) {
            const float value = __uint_as_float(at(v.word[i / 4], i % 4));
            const u32 one = value >= border[0], two = value >= border[1], three = value >= border[2];
            part[0][i / 16] |= (one ^ two ^ three) << i % 16, part[1][i / 16] |= two << i % 16;
        }
    } else {
        u32 halves[3];
        UNROLL for (int i = 0; i < 3; i++) halves[i] = half_above<X == 1>(border[i]) * 0x10001;
        UNROLL for (u32 i = 0; i < WORDS; i++) { // columns 2 i and 2 i + 1, whose bits go to the lower and the upper half
            const u32 values = at(v.word[i / 4], i % 4), bits = 1u << 2 * (i % 8) | 1u << (17 + 2 * (i % 8));
            const u32 one = at_least<X == 1>(values, halves[0]), two = at_least<X == 1>(values, halves[1]);
            const u32 three = at_least<X == 1>(values, halves[2]);
            part[0][i / 8] |= (one ^ two ^ three) & bits, part[1][i / 8] |= two & bits;
        }
        UNROLL for (int p = 0; p < 2; p++)
            UNROLL for (int i = 0; i < 2; i++) part[p][i] = (part[p][i] | part[p][i] >> 16) & 0xFFFF;
    }
    if (LANES == 2) {
        const u32 both = part[0][0] | part[1][0] << 16, other = __shfl_xor_sync(~0u, both, 1);
        const u32 even = lane % 2 ? other : both, odd = lane % 2 ? both : other;
        part[0][0] = even & 0xFFFF, part[1][0] = even >> 16, part[0][1] = odd & 0xFFFF, part[1][1] = odd >> 16;
    }
    return factors_of(part[0][0] | part[0][1] << 16, part[1][0] | part[1][1] << 16, scale, zero, group);
}

// ---- sums

INLINE float both_planes(int first, int second) { return __fmaf_rn(__uint_as_float(second), 2.0f, __uint_as_float(first)); }
// Adds group j of the lane's four of a row and a token: from what each plane of x has in common with both of the weight's.
INLINE void add_group(float &total, const float (&both)[2], const Unit &unit, const u32 (&scales)[2], const Factors &of,
                      u32 j) {
    const float zero = REAL ? half_to_float(unit.zero[REAL ? j / 2 : 0] >> 16 * (j % 2) & 0xFFFF)
                            : __uint_as_float(unit.zero[0] & 3 << 2 * j);
    float whole = zero * of.third[j];
    whole = __fmaf_rn(both[0], of.first[j], whole);
    whole = __fmaf_rn(both[1], of.second[j], whole);
    total = __fmaf_rn(half_to_float(scales[j / 2] >> 16 * (j % 2) & 0xFFFF), whole, total);
}
INLINE void add(float (&total)[PASS], const Unit &unit, const One &x) { // of a lane's row and groups
    const u32 scales[2] = {from_e4m3(unit.scale & 0xFFFF), from_e4m3(unit.scale >> 16)};
    UNROLL for (int pair = 0; pair < 2; pair++) {
        const u32 a[4] = {unit.pair[pair].x, unit.pair[pair].y, unit.pair[pair].z, unit.pair[pair].w};
        int count[2][4] = {}; // by plane of x: of both planes of the weight in two groups
        UNROLL for (int p = 0; p < 2; p++) count_common(count[p], a, x.word[pair][p][0], x.word[pair][p][1]);
        UNROLL for (int i = 0; i < 2; i++) {
            float both[2];
            UNROLL for (int p = 0; p < 2; p++) both[p] = both_planes(count[p][i], count[p][2 + i]);
            add_group(total[0], both, unit, scales, x.of, 2 * pair + i);
        }
    }
}
INLINE void add(float (&total)[PASS], const Unit &unit, const Two &x, u32 m) { // the same of tokens m and m + 1
    const u32 scales[2] = {from_e4m3(unit.scale & 0xFFFF), from_e4m3(unit.scale >> 16)};
    UNROLL for (u32 j = 0; j < 4; j++) {
        const uint4 &codes = unit.pair[j / 2];
        int count[2][4] = {}; // by plane of x: of both planes of the weight in both tokens
        UNROLL for (int p = 0; p < 2; p++)
            count_common(count[p], j % 2 ? codes.z : codes.x, j % 2 ? codes.w : codes.y, x.word[j][p]);
        UNROLL for (u32 i = 0; i < 2; i++) {
            if (m + i >= PASS) break;
            float both[2];
            UNROLL for (int p = 0; p < 2; p++) both[p] = both_planes(count[p][i], count[p][2 + i]);
            add_group(total[m + i], both, unit, scales, x.of[i], j);
        }
    }
}

#if SPLIT > 1
#define CLUSTER __cluster_dims__(SPLIT)
#else
#define CLUSTER
#endif
extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, BLOCKS)
w2a2_gemv(const char *__restrict__ weight, const float *__restrict__ factors, const char *__restrict__ x,
          const int *__restrict__ index, const u32 *__restrict__ x_codes, const float *__restrict__ x_scales,
          const int *__restrict__ x_zeros, void *__restrict__ y, u32 N, u32 K) {
    // Stages; sums [MOST][TOKENS][WARPS | 1][8], and other blocks'; x unless KEPT; columns that warps gather.
    extern __shared__ __align__(128) char shared[];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const u32 rank = blockIdx.x % SPLIT, first_unit = rank * SHARE, units = min(SHARE, UNITS - first_unit);
    u32 layer = 0, block = blockIdx.x / SPLIT, begin = 0, each = 0, more = 0;
    UNROLL for (u32 i = 0; i + 1 < LAYERS; i++)
        if (layer == i && block >= of_layer(LAYER_BLOCKS, i))
            block -= of_layer(LAYER_BLOCKS, i), begin += of_layer(LAYER_TILES, i), layer++;
    UNROLL for (u32 i = 0; i < LAYERS; i++)
        if (layer == i) {
            each = of_layer(LAYER_TILES, i) / of_layer(LAYER_BLOCKS, i);
            more = of_layer(LAYER_TILES, i) % of_layer(LAYER_BLOCKS, i); // so many blocks have a tile more than `each`
        }
    begin += block * each + min(block, more);
    const u32 end = begin + each + (block < more);
    const u32 rows = min(N, 8 * end) - 8 * begin;
    // A thread ends with sums of a row and a token: eight rows of a token, then of the next, as they lie in banks.
    auto row_of = [&](u32 place) { return TOKENS == 1 ? place : place / (8 * TOKENS) * 8 + place % 8; };
    const u32 my_row = row_of(threadIdx.x);
    float factor = __uint_as_float(load_early_if<4>(factors + 8 * begin + my_row, my_row < rows));
    float *sums = (float *)(shared + STAGES * TILES * PIECE);
    float *of_x = sums + MOST * TOKENS * (SUMS + 8 * (SPLIT - 1)); // [TOKENS][OWN][WARPS][80]: 4 times 12 factors, 32 words
    constexpr u32 OF_X = PAIRED || !KEPT ? TOKENS * OWN * WARPS * 80 : 0;
    const u32 my_columns = shared_address(of_x + OF_X) + warp * TOGETHER * 512 * SIZE;
    if (GATHER && layer) index += (u64)layer * 32 * G;
    weight += first_unit * UNIT;
#if SPLIT > 1
    __shared__ u64 received; // mbarrier: the other blocks' sums
    float *others = sums + MOST * TOKENS * SUMS; // [SPLIT - 1][TOKENS][8 MOST]
    const u32 arrived = shared_address(&received);
    if (rank == 0 && threadIdx.x == 0) expect_bytes(arrived, (SPLIT - 1) * TOKENS * rows * 4);
    cluster_arrive();
#endif

#if STAGES
    __shared__ u64 full[STAGES], empty[STAGES]; // mbarriers: a stage has arrived, is read
    const u32 stages = (end - begin + TILES - 1) / TILES;
    auto bring = [&](u32 stage, u32 slot) { // by one thread
        const u32 from = begin + stage * TILES, tiles = min((u32)TILES, end - from), bytes = units * UNIT;
        const u32 arrived = shared_address(full + slot), to = shared_address(shared) + slot * TILES * PIECE;
        signal_expect(arrived, tiles * bytes);
        if (SPLIT == 1) copy_bulk(to, weight + (u64)from * TILE, tiles * TILE, arrived, evict_first());
        else
            for (u32 i = 0; i < tiles; i++)
                copy_bulk(to + i * PIECE, weight + (u64)(from + i) * TILE, bytes, arrived, evict_first());
    };
    // One thread requests the stages, in their order, so that they arrive in it; the others have requested x before,
    // except by an index, as that waits.
    constexpr u32 BRINGER = AGAIN ? WARPS : WARPS - 1;
    const bool brings = warp == BRINGER && lane == 0;
    auto bring_first = [&]() {
#pragma unroll 1
        for (u32 stage = 0; stage < min((u32)STAGES, stages); stage++) bring(stage, stage);
    };
    if (brings) {
#pragma unroll 1
        for (u32 stage = 0; stage < min((u32)STAGES, stages); stage++) {
            signal_init(shared_address(full + stage), 1);
            if (AGAIN) signal_init(shared_address(empty + stage), WARPS);
        }
        show_signals();
        if (GATHER) bring_first();
    }
    if (AGAIN && warp == WARPS) {
        __syncthreads();
        if (lane == 0) {
            if (!GATHER) bring_first();
            u32 slot = 0, turn = 0;
#pragma unroll 1
            for (u32 stage = STAGES; stage < stages; stage++) {
                signal_wait(shared_address(empty + slot), turn);
                bring(stage, slot);
                if (++slot == STAGES) slot = 0, turn++;
            }
        }
    } else {
#else
    {
#endif
        u32 offset[OWN]; // of a warp's units; where it has fewer than OWN, it repeats the last unit, with an x of zeros
        UNROLL for (u32 own = 0; own < OWN; own++) offset[own] = kept(min(warp + own * WARPS, units - 1) * UNIT);

        constexpr u32 STEPS = (OWN * TOKENS + TOGETHER - 1) / TOGETHER;
        constexpr u32 AHEAD = READY || X == 2 || GATHER || STEPS < 2 ? 1 : 2; // steps whose x is loaded before the first
        auto item_of = [&](u32 step) { return step * TOGETHER + (LANES == 2 ? 0 : lane / 16); }; // token, then unit
        auto group_of = [&](u32 step) {
            const u32 item = item_of(step), unit = warp + item % OWN * WARPS;
            return item < OWN * TOKENS && unit < SHARE ? 16 * (first_unit + unit) + lane / LANES % 16 : G;
        };
        auto columns_at = [&](u32 step) {
            return columns_of(x + (u64)(item_of(step) / OWN) * K * SIZE, group_of(step), lane);
        };
        auto places_at = [&](u32 item) {
            const u32 unit = warp + item % OWN * WARPS;
            return places_of(index, unit < SHARE ? first_unit + unit : UNITS, lane, K);
        };
        auto gathered = [&](u32 step) {
            UNROLL for (u32 which = 0; which < TOGETHER; which++) {
                const u32 item = step * TOGETHER + which, m = item / OWN;
                if (item >= OWN * TOKENS) break;
                gather(my_columns + which * 512 * SIZE, x + (u64)m * K * SIZE, places_at(item), lane, K);
            }
            __syncwarp();
            Columns v;
            UNROLL for (u32 i = 0; i < WORDS / 4; i++) v.word[i] = load16(my_columns + COLUMNS * lane * SIZE + 16 * i);
            __syncwarp();
            return v;
        };
        Columns columns[AHEAD];
        if (GATHER) columns[0] = gathered(0);
        else if (!READY)
            UNROLL for (u32 i = 0; i < AHEAD; i++) columns[i] = columns_at(i);
#if !STAGES
        Unit next_units[TILES][OWN]; // of the next tiles
        const u64 policy = evict_first();
        auto load = [&](Unit *to, u32 tile) {
            UNROLL for (u32 own = 0; own < OWN; own++) {
                const char *unit = weight + (u64)tile * TILE + offset[own];
                UNROLL for (int i = 0; i < 2; i++) to[own].pair[i] = load_past_l1(unit + 512 * i + 16 * lane, policy);
                to[own].scale = __ldg((const u32 *)(unit + SCALES_AT) + lane);
                if (REAL)
                    UNROLL for (int i = 0; i < (REAL ? 2 : 1); i++)
                        to[own].zero[i] = __ldg((const u32 *)(unit + ZEROS_AT) + 2 * lane + i);
                else to[own].zero[0] = __ldg((const unsigned char *)unit + ZEROS_AT + lane);
            }
        };
        UNROLL for (u32 i = 0; i < TILES; i++)
            if (begin + i < end) load(next_units[i], begin + i);
#endif
#if STAGES
        __syncthreads();
        if (!AGAIN && !GATHER && brings) bring_first();
#endif

        auto ready = [&](u32 step) {
            const u32 m = item_of(step) / OWN, group = group_of(step);
            if (group >= G) return factors_of(0, 0, 0, 0, group);
            const u32 *words = x_codes + 2 * m * G + group;
            const float scale = __ldg(x_scales + m * G + group);
            return factors_of(__ldg(words), __ldg(words + G), scale, __ldg(x_zeros + m * G + group), group);
        };
        auto place_of = [&](u32 m, u32 own) { return of_x + ((m * OWN + own) * WARPS + warp) * 80; };
        auto factors_at = [&](const float *place) {
            Factors of;
            *(float4 *)of.first = *(const float4 *)(place + 12 * t);
            *(float4 *)of.second = *(const float4 *)(place + 12 * t + 4);
            *(float4 *)of.third = *(const float4 *)(place + 12 * t + 8);
            return of;
        };
        // Lanes pass on a single token's groups by shuffles, those of several through shared memory.
        auto one_of = [&](One &one, const Group &mine, u32 which) { // of the units of a step
            auto from = [&](u32 j) { return LANES * (16 * which + 4 * t + j); }; // a lane that has the lane's group j
            UNROLL for (u32 j = 0; j < 4; j++) {
                one.of.first[j] = __shfl_sync(~0u, mine.first, from(j), 32);
                one.of.second[j] = __shfl_sync(~0u, mine.second, from(j), 32);
                one.of.third[j] = __shfl_sync(~0u, mine.third, from(j), 32);
            }
            UNROLL for (u32 pair = 0; pair < 2; pair++)
                UNROLL for (int p = 0; p < 2; p++) {
                    const u32 word = __shfl_sync(~0u, mine.plane[p], from(2 * pair + g % 2), 32);
                    UNROLL for (u32 i = 0; i < 2; i++) one.word[pair][p][i] = kept(g == 2 * t + i ? word : 0);
                }
        };
        auto store_one = [&](const One &one, u32 own) {
            float *to = place_of(0, own);
            if (g == 2 * t) {
                *(float4 *)(to + 12 * t) = *(const float4 *)one.of.first;
                *(float4 *)(to + 12 * t + 4) = *(const float4 *)one.of.second;
                *(float4 *)(to + 12 * t + 8) = *(const float4 *)one.of.third;
            }
            if (g / 2 == t)
                UNROLL for (int pair = 0; pair < 2; pair++)
                    UNROLL for (int p = 0; p < 2; p++)
                        ((u32 *)to)[48 + 4 * g + 2 * pair + p] = one.word[pair][p][0] | one.word[pair][p][1];
        };
        auto one_at = [&](u32 own) {
            const float *from = place_of(0, own);
            One one;
            one.of = factors_at(from);
            uint4 v = {0, 0, 0, 0};
            load16_if(v, shared_address(from + 48 + 4 * g), g / 2 == t);
            UNROLL for (u32 pair = 0; pair < 2; pair++)
                UNROLL for (u32 p = 0; p < 2; p++)
                    UNROLL for (u32 i = 0; i < 2; i++) one.word[pair][p][i] = g % 2 == i ? at(v, 2 * pair + p) : 0;
            return one;
        };
        auto store_group = [&](const Group &mine, u32 step) { // by the lane that has it
            const u32 item = item_of(step), of = lane / LANES % 16;
            if (item >= OWN * TOKENS) return;
            float *to = place_of(item / OWN, item % OWN), *factors = to + of / 4 * 12 + of % 4;
            factors[0] = mine.first, factors[4] = mine.second, factors[8] = mine.third;
            store8(shared_address(to + 48 + 2 * of), {mine.plane[0], mine.plane[1]});
        };
        auto two_at = [&](u32 m, u32 own) { // tokens m and m + 1; past the last one m again
            const u32 next = min(m + 1, (u32)TOKENS - 1);
            const u32 from = shared_address(place_of(g % 2 ? next : m, own) + 48 + 8 * t);
            Two two;
            two.of[0] = factors_at(place_of(m, own)), two.of[1] = factors_at(place_of(next, own));
            uint4 words[2] = {};
            UNROLL for (u32 i = 0; i < 2; i++) load16_if(words[i], from + 16 * i, g / 2 == t);
            UNROLL for (u32 j = 0; j < 4; j++)
                UNROLL for (u32 p = 0; p < 2; p++) two.word[j][p] = at(words[j / 2], 2 * (j % 2) + p);
            return two;
        };
        constexpr u32 ONES = KEPT && !PAIRED ? OWN : 1, TWOS = KEPT && PAIRED ? OWN : 1, KEPT_PAIRS = KEPT ? PAIRS : 1;
        One ones[ONES];
        Two twos[KEPT_PAIRS][TWOS];
        auto take = [&]() {
            UNROLL for (u32 step = 0; step < STEPS; step += AHEAD) {
                if (!READY && step)
                    UNROLL for (u32 i = 0; i < AHEAD; i++) columns[i] = GATHER ? gathered(step + i) : columns_at(step + i);
                UNROLL for (u32 i = 0; i < AHEAD; i++) {
                    const Group mine = READY ? ready(step + i) : quantized(columns[i], group_of(step + i), lane);
                    if (PAIRED) {
                        store_group(mine, step + i);
                        continue;
                    }
                    UNROLL for (u32 which = 0; which < TOGETHER; which++) {
                        const u32 own = (step + i) * TOGETHER + which;
                        if (own >= OWN) break;
                        One one;
                        one_of(one, mine, which);
                        if (KEPT) ones[own % ONES] = one;
                        else store_one(one, own);
                    }
                }
            }
            if (PAIRED || !KEPT) __syncwarp();
        };
        auto keep = [&](u32 first) { // the tokens from `first` on
            if (!KEPT || !PAIRED) return;
            UNROLL for (u32 pair = 0; pair < PAIRS; pair++)
                UNROLL for (u32 own = 0; own < OWN; own++)
                    twos[pair % KEPT_PAIRS][own % TWOS] = two_at(first + 2 * pair, own);
        };
        auto add_all = [&](float (&total)[AT_ONCE][PASS], const Unit (&unit)[AT_ONCE], u32 own) { // of the tokens kept
            if (!PAIRED) {
                const One one = KEPT ? ones[own % ONES] : one_at(own);
                UNROLL for (u32 r = 0; r < AT_ONCE; r++) add(total[r], unit[r], one);
                return;
            }
            UNROLL for (u32 pair = 0; pair < PAIRS; pair++) {
                const Two two = KEPT ? twos[pair % KEPT_PAIRS][own % TWOS] : two_at(2 * pair, own);
                UNROLL for (u32 r = 0; r < AT_ONCE; r++) add(total[r], unit[r], two, 2 * pair);
            }
        };

        float *my_sums = sums + kept(warp * 8 + g);
        auto finish = [&](u32 first, u32 tile, const float total[PASS]) { // tile of this block
            float *to = my_sums + (tile * TOKENS + first) * SUMS;
            if (PASS == 4) { // lane t gets the sum of token t
                float two[2];
                UNROLL for (u32 i = 0; i < 2; i++) {
                    const float even = total[2 * i % PASS], odd = total[(2 * i + 1) % PASS];
                    two[i] = (t % 2 ? odd : even) + __shfl_xor_sync(~0u, t % 2 ? even : odd, 1);
                }
                to[t * SUMS] = (t / 2 ? two[1] : two[0]) + __shfl_xor_sync(~0u, t / 2 ? two[0] : two[1], 2);
                return;
            }
            if (PASS == 2) { // lanes t and t + 2 get that of token t % 2
                const float even = total[0], odd = total[PASS - 1];
                float sum = (t % 2 ? odd : even) + __shfl_xor_sync(~0u, t % 2 ? even : odd, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                if (t < 2) to[t * SUMS] = sum;
                return;
            }
            UNROLL for (u32 m = 0; m < PASS; m++) {
                float sum = total[m];
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                if (t == 0) to[m * SUMS] = sum;
            }
        };

#if STAGES
        const u32 codes_at = kept(shared_address(shared) + 16 * lane);
        const u32 scales_at = kept(shared_address(shared) + SCALES_AT + 4 * lane);
        const u32 zeros_at = kept(shared_address(shared) + ZEROS_AT + (REAL ? 8 : 1) * lane);
        auto read = [&](Unit &unit, u32 from) { // bytes from the beginning of shared memory
            UNROLL for (u32 i = 0; i < 2; i++) unit.pair[i] = load16(codes_at + from + 512 * i);
            u32 scale[1];
            load_few(scale, scales_at + from);
            unit.scale = scale[0];
            if (REAL) load_few(unit.zero, zeros_at + from);
            else unit.zero[0] = load_byte(zeros_at + from);
        };
        static_assert(PASS == TOKENS || !AGAIN, "stages are gone before the next tokens");
        take();
#pragma unroll 1
        for (u32 first = 0; first < TOKENS; first += PASS) {
            keep(first);
            u32 slot = 0, turn = 0;
#pragma unroll 1
            for (u32 stage = 0; stage < stages; stage++) {
                signal_wait(shared_address(full + slot), turn);
                UNROLL for (u32 i = 0; i < TILES; i += AT_ONCE) {
                    const u32 tile = stage * TILES + i;
                    if (tile >= end - begin) break;
                    float total[AT_ONCE][PASS] = {};
                    UNROLL for (u32 own = 0; own < OWN; own++) {
                        Unit unit[AT_ONCE];
                        UNROLL for (u32 r = 0; r < AT_ONCE; r++) read(unit[r], (slot * TILES + i + r) * PIECE + offset[own]);
                        add_all(total, unit, own);
                    }
                    UNROLL for (u32 r = 0; r < AT_ONCE; r++)
                        if (tile + r < end - begin) finish(first, tile + r, total[r]);
                }
                if (AGAIN) {
                    __syncwarp();
                    if (lane == 0 && stage + STAGES < stages) signal_arrive(shared_address(empty + slot));
                }
                if (++slot == STAGES) slot = 0, turn++;
            }
        }
#else
        static_assert(PASS == TOKENS, "weights are in registers once");
        take();
        keep(0);
#pragma unroll 1
        for (u32 next = begin; next < end; next += TILES)
            UNROLL for (u32 i = 0; i < TILES; i += AT_ONCE) {
                const u32 tile = next + i;
                if (tile >= end) break;
                float total[AT_ONCE][PASS] = {};
                UNROLL for (u32 own = 0; own < OWN; own++) {
                    Unit unit[AT_ONCE];
                    UNROLL for (u32 r = 0; r < AT_ONCE; r++) unit[r] = next_units[i + r][own];
                    add_all(total, unit, own);
                }
                UNROLL for (u32 r = 0; r < AT_ONCE; r++) {
                    if (tile + r + TILES < end) load(next_units[i + r], tile + r + TILES);
                    if (tile + r < end) finish(0, tile + r - begin, total[r]);
                }
            }
#endif
    }
#if SPLIT > 1
    cluster_wait(); // the first block has started
#endif
    __syncthreads();
#if SPLIT > 1
    if (rank == 0) wait_for_bytes(arrived);
#endif
    const u32 places = TOKENS == 1 ? rows : (rows + 7) / 8 * 8 * TOKENS;
    for (u32 place = threadIdx.x; place < places; place += THREADS) {
        const u32 row = row_of(place), m = place / 8 % TOKENS;
        if (TOKENS > 1 && row >= rows) continue;
        if (place >= THREADS) factor = __ldg(factors + 8 * begin + row);
        const float *of_row = sums + (row / 8 * TOKENS + m) * SUMS + row % 8;
        float sum = 0;
        UNROLL for (int w = 0; w < WARPS; w++) sum += of_row[8 * w];
#if SPLIT > 1
        if (rank) {
            send(shared_address(others + ((rank - 1) * TOKENS + m) * 8 * MOST + row), sum, arrived, 0);
            continue;
        }
        UNROLL for (u32 r = 1; r < SPLIT; r++) sum += others[((r - 1) * TOKENS + m) * 8 * MOST + row];
#endif
        sum *= factor * DOWN;
        const u64 to = (u64)m * N + 8 * begin + row;
        if (READY || X == 2) ((float *)y)[to] = sum;
        else ((u16 *)y)[to] = to_half<X == 1>(sum);
    }
}
