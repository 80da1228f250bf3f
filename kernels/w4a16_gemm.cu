// y[M, N] = x[M, K] W^T for packed low-bit W (w4a16_gemm.py says how a program works), and W itself (dequantize.py).
//
// Compile-time constants: BITS 2, 4 or 8; GROUP columns (0: one group a row); SYMMETRIC; BF16 (else fp16); for the product
//   MT      tokens of a tile, a multiple of 8        RT      row tiles of 16 that a warp owns
//   WR, WK  warps side by side over rows, columns    KS      columns of x in a stage of the whole program
//   STAGES  stages of x in shared memory             BLOCKS  programs that a multiprocessor must hold (caps registers)
//   SPLIT   programs of a cluster, which share K     SCALED  where the scale of a group goes in (below)
//
// Codes of a lane are masked where they lie in a word and read as subnormal numbers of the activations' type: code * 2^-24
// (fp16) or code * 2^-133 (bf16), times 2^2, 2^4 or 2^6 for fields that begin at bit 2, 4 or 6. One fma makes
// (code - zero) * 2^-DOWN of them, exactly.

#include "ptx.cuh"

#if BF16
constexpr u32 FIELD = 0x7F00, EXPONENT = 7, DOWN = 6;   // 2^127 lifts code * 2^-133 to code * 2^-6
#else
constexpr u32 FIELD = 0x7800, EXPONENT = 10, DOWN = 9;  // 2^15 lifts code * 2^-24 to code * 2^-9
#endif
constexpr u32 TWICE = 0x00010001;
constexpr int KB = 256 / BITS;        // columns of a packed block of 16 rows
constexpr int PER_WORD = 16 / BITS;   // register pairs of codes in a 32-bit word
constexpr int ZEROS = SYMMETRIC ? 1 : 2;

// Registers r (r = 4 * step + i, i = 0 .. 3 for a0 .. a3 of the mma's A operand) as (code - zero) * 2^-DOWN.
INLINE u32 unpack(const uint4& words, int r, u32 minus_zero) {
    int shift = BITS * (r % PER_WORD), fine = shift & 7;
    u32 codes = ((&words.x)[r / PER_WORD] >> (shift - fine)) & (((1u << BITS) - 1) << fine) * TWICE;
    return multiply_add<BF16>(codes, (FIELD - (fine << EXPONENT)) * TWICE, minus_zero);
}
INLINE u32 times(u32 a, float factor) { return multiply<BF16>(a, to_halves<BF16>(factor, factor)); }

// Scale and zero of rows g and g + 8 of a row tile in one group; for symmetric weights one word with both scales.
struct alignas(4 * ZEROS) Scales { u32 rows[ZEROS]; };
INLINE float scale(const Scales& s, int row) {
    return half_to_float(SYMMETRIC && row ? s.rows[0] >> 16 : s.rows[row * (ZEROS - 1)]);
}
INLINE float zero(const Scales& s, int row) {
    return SYMMETRIC ? 1 << (BITS - 1) : half_to_float(s.rows[row * (ZEROS - 1)] >> 16);
}
INLINE u32 minus_zero(const Scales& s, int row) {  // in both halves, times 2^-DOWN
    float z = zero(s, row) / -(1 << DOWN);
    return to_halves<BF16>(z, z);
}
INLINE Scales load_scales(const Scales* p) {
    Scales s;
    if (SYMMETRIC) *(u32*)&s = __ldg((const u32*)p);
    else *(uint2*)&s = __ldg((const uint2*)p);
    return s;
}

#ifndef MT
// ------------------------------------------------------------------------------------------------ dense W [N, K]
extern "C" __global__ void dequantize(const uint4* codes, const Scales* scales, u16* w, int N, int K,
                                      int groups) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, blocks = (K + KB - 1) / KB;
    int place = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, tile = place / blocks, block = place % blocks;
    if (tile >= (N + 15) / 16) return;
    uint4 words = codes[place * 32 + lane];
UNROLL for (int pair = 0; pair < KB / 32; pair++) {  // two k-steps: eight neighbouring columns of rows g and g + 8
        int column = block * KB + pair * 32 + 8 * t;
        if (column >= K) break;
        Scales s = load_scales(scales + (tile * groups + (GROUP ? column / max(GROUP, 1) : 0)) * 8 + g);
UNROLL for (int half = 0; half < 2; half++) {
            int row = tile * 16 + g + 8 * half;
            if (row >= N) break;
            uint4 out;
UNROLL for (int j = 0; j < 4; j++) {  // columns 2j, 2j + 1
                int r = 4 * (2 * pair + j / 2) + 2 * (j % 2) + half;
                u32 code = (&words.x)[r / PER_WORD] >> (BITS * (r % PER_WORD));
                float z = zero(s, half), step = scale(s, half);
                constexpr unsigned mask = (1 << BITS) - 1;
                (&out.x)[j] = to_halves<BF16>(((code & mask) - z) * step, ((code >> 16 & mask) - z) * step);
            }
            u16* to = w + (long long)row * K + column;
            if (K % 8 == 0) *(uint4*)to = out;
            else
                UNROLL for (int e = 0; e < 8; e++)
                    if (column + e < K) to[e] = (&out.x)[e / 2] >> 16 * (e % 2);
        }
    }
}
#else
// ------------------------------------------------------------------------------------------------ the product
constexpr int KW = KS / WK;                         // columns of a stage that one warp works on
constexpr int DEPTH = KW / KB;                      // packed blocks of a row tile in them, all in flight at once
constexpr int FOLD = GROUP && GROUP < KW ? GROUP : KW;  // columns that share a scale, whose products are folded together
#ifndef SCALED
constexpr bool SCALED = MT >= 64;  // into the weights, not into the sums of a group: fewer registers, a rounding more
#endif
constexpr int NT = MT / 8, ROWS = 16 * RT * WR, THREADS = 32 * WR * WK, LD = ROWS + 4, STAGE = MT * KW * 2;
static_assert(32 * WR % (KW / 8) == 0 && KW % KB == 0 && KW % 64 == 0 && KW % FOLD == 0 && (GROUP == 0 || GROUP % FOLD == 0),
              "a stage does not divide");

#if __CUDA_ARCH__ < 900  // a cluster is one program
INLINE u32 cluster_rank() { return 0; }
INLINE void cluster_arrive() {}
INLINE void cluster_wait() {}
INLINE void cluster_barrier() {}
INLINE float4 load_from_block(u32 p, u32) {
    uint4 v = load16(p);
    return (float4&)v;
}
#endif

extern "C" __global__ void
#if SPLIT > 1
__cluster_dims__(SPLIT)
#endif
__launch_bounds__(THREADS, BLOCKS) gemm(const u16* x, const uint4* codes, const Scales* scales,
                                        u16* y, int M, int N, int K, int groups) {
    extern __shared__ __align__(128) char shared[];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const u32 split = SPLIT, rank = cluster_rank();
    int token_tiles = (M + MT - 1) / MT, place = blockIdx.x / split;  // neighbours share weights
    int m0 = place % token_tiles * MT, n0 = place / token_tiles * ROWS;
    int first_tile = n0 / 16 + warp % WR * RT, my_column = warp / WR * KW;
    int tiles = (N + 15) / 16, blocks = (K + KB - 1) / KB, slabs = (K + KS - 1) / KS;
    int slab = slabs * rank / split, last = slabs * (rank + 1) / split;

    u64 policy = token_tiles == 1 ? evict_first() : evict_normal();  // are weights read once, or by several programs?

    // What a lane needs of one stage. Past the end of W or of this program's columns it keeps older words: their tokens
    // are zero or their rows are not stored.
    uint4 weights[RT][DEPTH] = {};
    Scales scaling[RT][KW / FOLD] = {};
    const uint4* next_words = codes + (first_tile * blocks + (slab * KS + my_column) / KB) * 32 + lane;
    const Scales* next_scales;
    int words_left, scales_left;
    auto move_to = [&](unsigned to) {  // the stage that the next loads are for
        unsigned column = to * KS + my_column, group = GROUP ? column / max(GROUP, 1) : 0;
        next_scales = scales + (first_tile * groups + group) * 8 + g;
        words_left = to < last ? blocks - column / KB : 0;
        scales_left = to < last ? groups - group : 0;
    };
    auto load_words = [&](int r, int d) {
        if (r < tiles - first_tile && d < words_left)
            weights[r][d] = load_past_l1(next_words + (r * blocks + d) * 32, policy);
    };
    auto load_scaling = [&](int r, int f) {
        if (r < tiles - first_tile && f < scales_left)
            scaling[r][f] = load_scales(next_scales + (r * groups + f) * 8);
    };
    move_to(slab);
UNROLL for (int d = 0; d < DEPTH; d++)
UNROLL for (int r = 0; r < RT; r++) load_words(r, d);
UNROLL for (int f = 0; f < KW / FOLD; f++)
UNROLL for (int r = 0; r < RT; r++) load_scaling(r, f);
    // The WR warps that share columns are a pipeline with its own stages and barrier: two pipelines drift apart, and one
    // unpacks while the other multiplies. A stage is x[m0 .. m0 + MT, KW columns], zeros outside x. A row is KW * 2 bytes;
    // odd ones swap the 64-byte halves of every 128, so that eight lanes that read 16 bytes each meet all 32 banks.
    constexpr int MEMBERS = 32 * WR, CHUNKS = KW / 8, TOKENS = MEMBERS / CHUNKS;
    unsigned member = threadIdx.x % MEMBERS, token = member / CHUNKS, chunk = member % CHUNKS;
    unsigned stages = shared_address(shared) + warp / WR * STAGES * STAGE;
    const u16* x_row = x + (u64)(m0 + token) * K + my_column + chunk * 8;
    auto stage = [&](int to, int buffer) {
        int tokens_left = to < last && to * KS + my_column + chunk * 8 < K ? M - m0 - token : 0;
UNROLL for (int i = 0; i < MT; i += TOKENS)
            if (MT % TOKENS == 0 || token + i < MT)
                copy_past_l1(stages + buffer * STAGE + (token + i) * KW * 2 + (chunk ^ (token + i & 1) * 4) * 16,
                             x_row + to * KS + i * K, i >= tokens_left);
        end_of_copies();
    };
UNROLL for (int i = 0; i < STAGES - 1; i++) stage(slab + i, i);

    float sum[RT][NT][4] = {}, part[RT][NT][4];
    auto& product = SCALED ? sum : part;
    for (int i = 0; slab < last; slab++, i = i + 1 == STAGES ? 0 : i + 1) {
        wait_for_copies<STAGES - 2>();
        barrier(warp / WR + 1, MEMBERS);
        int ahead = i == 0 ? STAGES - 1 : i - 1;  // the stage that all have just left
        stage(slab + STAGES - 1, ahead);
        move_to(slab + 1);
        next_words += KS / KB * 32;
        unsigned from = stages + i * STAGE + g * KW * 2 + ((t * 16) ^ (g & 1) * 64);
UNROLL for (int column = 0; column < KW; column += 32) {  // two k-steps
            int d = column / KB, step = column % KB / 16, f = column / FOLD;
            if (!SCALED && column % FOLD == 0)
UNROLL for (int v = 0; v < RT * NT * 4; v++) part[v / (NT * 4)][v / 4 % NT][v % 4] = 0;
            unsigned a[RT][8];
UNROLL for (int r = 0; r < RT; r++)
UNROLL for (int v = 0; v < 8; v++) {
                    a[r][v] = unpack(weights[r][d], 4 * step + v, minus_zero(scaling[r][f], v % 2));
                    if (SCALED) a[r][v] = times(a[r][v], scale(scaling[r][f], v % 2) * (1 << DOWN));
                }
            if ((column + 32) % KB == 0)
UNROLL for (int r = 0; r < RT; r++) load_words(r, d);
UNROLL for (int n = 0; n < NT; n++) {
                // 64 bytes on within 128: an exclusive or with the bit that odd tokens have flipped
                uint4 b = load16((from ^ column % 64 * 2) + column / 64 * 128 + n * 8 * KW * 2);
UNROLL for (int r = 0; r < RT; r++) mma<BF16>(product[r][n], a[r], b.x, b.y);
UNROLL for (int r = 0; r < RT; r++) mma<BF16>(product[r][n], a[r] + 4, b.z, b.w);
            }
            if ((column + 32) % FOLD == 0)
UNROLL for (int r = 0; r < RT; r++) {
                    float low = scale(scaling[r][f], 0), high = scale(scaling[r][f], 1);
                    if (!SCALED)
UNROLL for (int n = 0; n < NT; n++)
UNROLL for (int v = 0; v < 4; v++) sum[r][n][v] += (v < 2 ? low : high) * part[r][n][v];
                    load_scaling(r, f);
                }
        }
    }

    // Sums of the warps that share rows, then of the programs of the cluster, always in the same order.
    float* tile = (float*)shared;  // [MT][LD], the stages are free
    wait_for_copies<0>();
    for (int k = 0; k < WK; k++) {
        __syncthreads();
        if (warp / WR == k)
UNROLL for (int v = 0; v < RT * NT * 4; v++) {
                int r = v / (NT * 4), n = v / 4 % NT, c = v % 4;
                float* at = tile + (n * 8 + 2 * t + c % 2) * LD + (warp % WR * RT + r) * 16 + g + c / 2 * 8;
                *at = k ? *at + sum[r][n][c] : sum[r][n][c];
            }
    }
    __syncthreads();
    if (split > 1) cluster_barrier();
    for (unsigned i = rank * THREADS + threadIdx.x; i < MT * ROWS / 4; i += split * THREADS) {
        int token = i / (ROWS / 4), row = i % (ROWS / 4) * 4;
        float4 from[8], total = {};
UNROLL for (int r = 0; r < 8; r++)
            if (r < split) from[r] = load_from_block(shared_address(tile) + (token * LD + row) * 4, r);
UNROLL for (int r = 0; r < 8; r++)
            if (r < split)
                total.x += from[r].x, total.y += from[r].y, total.z += from[r].z, total.w += from[r].w;
        if (m0 + token >= M) continue;
        float factor = SCALED ? 1 : 1 << DOWN;
        u16* to = y + (long long)(m0 + token) * N + n0 + row;
        uint2 out = {to_halves<BF16>(total.x * factor, total.y * factor), to_halves<BF16>(total.z * factor, total.w * factor)};
        if (N % 4 == 0 && n0 + row < N) *(uint2*)to = out;
        else
            for (int e = 0; e < 4 && n0 + row + e < N; e++) to[e] = (e < 2 ? out.x : out.y) >> 16 * (e % 2);
    }
    if (split > 1) cluster_arrive(), cluster_wait();  // not while others read its sums
}
#endif
