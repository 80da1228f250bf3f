// y [M, N] = x [M, K] W^T for M <= 16 and weights of 2, 4 or 8 bits. Method: wna16_gemv.py; layout: packing.py.
//
// Compile-time constants (-D). Problem: K, a multiple of 8; BITS 2 4 8; GROUP 0 32 64 128 columns (0: one group per
// row); SYMMETRIC 0 1; BF16 0 1 (else float16); COLUMNS 1 8 16 >= M. Launch: WARPS per thread block; TILES of 16 rows
// per warp; CHUNK columns per copy, a multiple of 128, and a power of two if COLUMNS > 1; STAGES chunks in flight;
// SPLITS thread blocks of a cluster, which split a row tile's columns (more than 1 needs sm_90); BLOCKS per SM, which
// caps the registers. RANK: outputs get a correction (correction.cuh). RANKS: they are partial sums (peers.cuh).
//
// Every warp has its own ring of STAGES slots in shared memory. A slot holds one chunk: codes, scales and zeros of the
// warp's row tiles, and activations. Copies are asynchronous, and warps do not wait for one another before the final
// reduction. The time of a small layer depends on the instructions before the first copy and after the last: hence K is
// a compile-time constant, and there is no loop if every warp has one chunk.

#include "beside.cuh"
#include "halves.cuh"
#if RANK
#include "correction.cuh"
#endif
#if RANKS
#include "peers.cuh"
#endif

constexpr u32 PARTS = CHUNK / 128;                 // of a chunk; one part's codes are in registers at a time
constexpr int LOADS = BITS / 2;                    // of 16 bytes: a lane's codes of one part of a tile
constexpr int GROUPS = GROUP ? 128 / GROUP : 1;    // in a part
constexpr int PAIRS = 4 / GROUPS;                  // of mma k-steps per group
constexpr u32 PIECES = CHUNK / 8;                  // of 16 bytes in a chunk of one row of activations
constexpr int BATCHES = (COLUMNS + 7) / 8;         // of 8 rows of activations, the columns of an mma's operand B
constexpr int KEPT = COLUMNS == 1 ? 1 : 2;         // sums that a lane keeps of its two columns
constexpr int OUTPUTS = TILES * COLUMNS * 16;      // of a block
constexpr u32 WORKERS = SPLITS * WARPS;            // warps that share a row tile's chunks, interleaved
constexpr u32 CHUNKS = (K + CHUNK - 1) / CHUNK;
constexpr bool RAGGED = K % CHUNK != 0;

constexpr u32 GROUP_BYTES = SYMMETRIC ? 32 : 64;   // scales and zeros of 16 rows
constexpr u32 TILE_BYTES = (K * BITS + 255) / 256 * 512, TILE_SCALE_BYTES = (GROUP ? K / GROUP : 1) * GROUP_BYTES;
constexpr u32 CODE_BYTES = PARTS * LOADS * 512, SCALE_BYTES = GROUP ? PARTS * GROUPS * GROUP_BYTES : 0; // of a chunk
constexpr u32 SCALES_AT = TILES * CODE_BYTES, X_AT = SCALES_AT + TILES * SCALE_BYTES;                   // in a slot
constexpr u32 SLOT = X_AT + COLUMNS * CHUNK * 2;

// A single row of bfloat16 activations is converted to scaled float16, which is cheaper than bfloat16 codes.
constexpr bool SCALED = BF16 && COLUMNS == 1, BRAIN = BF16 && !SCALED; // BRAIN: the tensor core takes bfloat16

// A code q becomes an operand value (q + OFFSET) * UNIT. float16: q is the mantissa of a subnormal, UNIT is 2^-24, and
// 2^RAISED times that in rows g+8, whose codes are RAISED bits higher. bfloat16, where such products would underflow:
// 128 + q or, raised, 4 (32 + q).
constexpr int RAISED = BITS == 8 || BITS == 4 && BRAIN ? 0 : BITS;
constexpr float OFFSET = !BRAIN ? 0 : BITS == 8 ? 2176 : 128, OFFSET_RAISED = OFFSET / (1 << RAISED);
constexpr float UNITS = BRAIN ? 1 : 1 << 24, UNITS_RAISED = UNITS / (1 << RAISED); // 1 / UNIT
constexpr u32 ONE = BRAIN ? 0x3F803F80 : 0x00010001, ONE_RAISED = !BRAIN ? ONE << RAISED : RAISED ? 0x40804080 : ONE;
constexpr bool JOINED = BITS == 4 && !BRAIN;           // rows g hold q[g] + 16 q[g+8], which saves an instruction
constexpr bool SPREAD = BITS == 2 && !BRAIN;           // the second chain's codes are 4 bits higher
constexpr int CHAINS = COLUMNS == 1 || SPREAD ? 2 : 1; // independent accumulators

// ---- arithmetic

// c += codes times x for a pair of steps, 32 columns. words: the lane's codes of a part; x: its share of 8 rows each.
INLINE void multiply(float (*c)[BATCHES][4], const uint4 *words, int pair, const uint4 *x) {
    constexpr u32 magic = BRAIN ? 0x43004300 : 0; // 128
    const u32 *word = &words[0].x + pair * BITS / 2;
    UNROLL for (int i = 0; i < 2; i++) {
        u32 a[4], high[4];
        if (BITS == 8) {
            u32 w = word[2 * i], v = word[2 * i + 1], parts[4] = {w, w >> 8, v, v >> 8};
            if (BRAIN) { // two operands: 128 + lower four bits, 16 (128 + upper four bits)
                UNROLL for (int j = 0; j < 4; j++) {
                    a[j] = parts[j] & 0x000F000F | magic;
                    high[j] = parts[j] >> 4 & 0x000F000F | 0x45004500;
                }
            } else
                a[0] = w & 0x00FF00FF, a[1] = upper_bytes(w), a[2] = v & 0x00FF00FF, a[3] = upper_bytes(v);
        } else if (BITS == 4) {
            u32 w = word[i], v = upper_bytes(w);
            if (BRAIN) {
                a[0] = w & 0x000F000F | magic, a[1] = w >> 4 & 0x000F000F | magic;
                a[2] = v & 0x000F000F | magic, a[3] = v >> 4 & 0x000F000F | magic;
            } else
                a[0] = w & 0x00FF00FF, a[1] = w & 0x00F000F0, a[2] = v, a[3] = v & 0x00F000F0;
        } else { // i is not the k-step: codes at the same bits of their bytes form one operand
            u32 w = word[0], v = upper_bytes(w);
            if (!SPREAD) w >>= 4 * i, v >>= 4 * i;
            constexpr u32 mask = 0x00030003;
            const u32 at = SPREAD ? 4 * i : 0;
            a[0] = w & mask << at | magic, a[1] = w & mask << at + 2 | magic;
            a[2] = v & mask << at | magic, a[3] = v & mask << at + 2 | magic;
        }
        UNROLL for (int n = 0; n < BATCHES; n++) {
            u32 b0 = i == 0 ? x[n].x : BITS == 2 ? x[n].y : x[n].z;
            u32 b1 = i == 1 ? x[n].w : BITS == 2 ? x[n].z : x[n].y;
            mma<BRAIN>(c[i % CHAINS][n], a, b0, b1);
            if (BITS == 8 && BRAIN) mma<BRAIN>(c[i % CHAINS][n], high, b0, b1);
        }
    }
}

// total += s (c - z sum x): scale and zero of one group, in float32. c and sums carry the same UNIT. unit: the inverse
// of the factor that scales x. scales: (scale, zero) of row g and of row g+8; symmetric: their two scales.
INLINE void scale(float total[BATCHES][2][KEPT], const float (*c)[BATCHES][4], const float (*sums)[4], uint2 scales,
                  float unit) {
    float s[2], z[2];
    UNROLL for (int half = 0; half < 2; half++) {
        u32 pair = half ? scales.y : scales.x;
        s[half] = half_to_float(SYMMETRIC ? scales.x >> 16 * half : pair);
        z[half] = SYMMETRIC ? float(1 << (BITS - 1)) : half_to_float(pair >> 16);
        if (BRAIN) z[half] += half ? OFFSET_RAISED : OFFSET;
        if (SCALED) s[half] *= unit;
    }
    UNROLL for (int n = 0; n < BATCHES; n++)
        UNROLL for (int k = 0; k < KEPT; k++) {
            float low = c[0][n][k], high = c[0][n][2 + k], more = SPREAD ? 1.f / 16 : 1.f;
            if (CHAINS == 2) low += c[1][n][k] * more, high += c[1][n][2 + k] * more;
            if (JOINED) low -= high;
            total[n][0][k] += s[0] * (low - z[0] * sums[n][k]);
            total[n][1][k] += s[1] * (high - z[1] * sums[n][2 + k]);
        }
}

// Converts a warp's CHUNK bfloat16 values to float16, in place, times the power of two that brings the largest one to
// 2^14 ... 2^15; only values of about 2^-29 of the largest or less are rounded. Returns the inverse of the power.
INLINE float scale_down(const char *x, u32 lane) {
    auto own = (uint2 *)x + lane;
    u32 most = 0;
    UNROLL for (int i = 0; i < PARTS; i++)
        most = __vmaxu2(most, __vmaxu2(own[32 * i].x & 0x7FFF7FFF, own[32 * i].y & 0x7FFF7FFF));
    const Power power = power_of(most);
    auto scaled = [&](u32 v) {
        return to_halves<0>(__uint_as_float(v << 16) * power.factor, __uint_as_float(v & 0xFFFF0000) * power.factor);
    };
    UNROLL for (int i = 0; i < PARTS; i++) own[32 * i] = {scaled(own[32 * i].x), scaled(own[32 * i].y)};
    __syncwarp();
    return power.inverse;
}

// ---- the kernel; a thread block computes TILES row tiles

#if SPLITS > 1
#define CLUSTER __cluster_dims__(SPLITS)
#else
#define CLUSTER
#endif

extern "C" __global__ void CLUSTER __launch_bounds__(32 * WARPS, BLOCKS)
wna16_gemv(const char *__restrict__ codes, const char *__restrict__ scale_zero, const u16 *__restrict__ x,
           u16 *__restrict__ y, u32 N, u32 M
#if RANK
           , const char *__restrict__ up, const float *latent, u32 first, u32 end, u32 first2, u32 end2, u32 first3,
           u32 end3
#endif
#if RANKS
           , PEERS_TAKEN
#endif
) {
    extern __shared__ __align__(128) char shared[]; // partial sums of all workers, then the rings
    auto partial = (float (*)[OUTPUTS])shared;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const u32 rank = blockIdx.x % SPLITS, tile = blockIdx.x / SPLITS * TILES, worker = rank * WARPS + warp;
    const u32 tiles_left = TILES > 1 ? (N - 1) / 16 - tile : 0; // a tile past the last one repeats the last one
    const char *ring = shared + WORKERS * OUTPUTS * 4 + warp * (STAGES * SLOT);
    const u64 policy = evict_first();
#if RANKS
    const Peers peers = PEERS_GIVEN;
    begin_next(); // what adds up the partial sums, and waits for each
#endif
#if RANK
    static_assert(COLUMNS == 1 && OUTPUTS <= 32 * WARPS); // a thread has one output
    const Spans spans = {{first, first2, first3}, {end, end2, end3}};
    const u32 output = tile * 16 + threadIdx.x;
    Correction correction(up, latent, rank == 0 && threadIdx.x < OUTPUTS && output < N ? output : NO_OUTPUT, spans);
#endif

    // What this lane copies next.
    u32 next = worker;
    const char *next_codes = codes + (u64)tile * TILE_BYTES + (worker * CODE_BYTES + lane * 16);
    const char *next_scales = scale_zero + (u64)tile * TILE_SCALE_BYTES + (worker * SCALE_BYTES + lane * 16);
    const u16 *next_x = x + (lane / PIECES * K + worker * CHUNK + lane % PIECES * 8);

    // Copies the warp's next chunk, if any, into a slot: activations, then weights. Columns beyond K are zeros.
    auto load = [&](u32 slot) {
        const bool more = CHUNKS == WORKERS && STAGES == 1 || next < CHUNKS; // later stages have no chunk of their own
        UNROLL for (u32 i = 0; i < COLUMNS * PIECES; i += 32) {
            u32 row = lane / PIECES + i / PIECES, piece = lane % PIECES + i % PIECES;
            u32 swizzled = COLUMNS > 1 ? piece ^ (row & 1) << 2 : piece; // rows read together use different banks
            bool mine = row < (COLUMNS > 1 ? M : 1) && piece < PIECES, beyond = RAGGED && next * CHUNK + piece * 8 >= K;
            const u16 *from = next_x + i / PIECES * K + i % PIECES * 8;
            copy(slot + X_AT + (row * PIECES + swizzled) * 16, from, more && mine, beyond);
        }
        end_of_copies();
        auto copy_of_tile = [&](u32 to, const char *from, u32 bytes, u32 end) {
            UNROLL for (u32 i = 0; i < bytes; i += 512) {
                bool beyond = RAGGED && next * bytes + i + lane * 16 >= end;
                copy_once(slot + to + i + lane * 16, from + i, policy, more && i + lane * 16 < bytes, beyond);
            }
        };
        UNROLL for (u32 r = 0; r < TILES; r++) {
            u32 up = r ? min(r, tiles_left) : 0;
            const char *scales = next_scales + up * TILE_SCALE_BYTES;
            copy_of_tile(SCALES_AT + r * SCALE_BYTES, scales, SCALE_BYTES, TILE_SCALE_BYTES);
            copy_of_tile(r * CODE_BYTES, next_codes + up * TILE_BYTES, CODE_BYTES, TILE_BYTES);
        }
        end_of_copies();
        next += WORKERS, next_x += WORKERS * CHUNK;
        next_codes += WORKERS * CODE_BYTES, next_scales += WORKERS * SCALE_BYTES;
    };
    auto scales_of = [&](const char *from) { // rows g and g+8, from shared or global memory
        return SYMMETRIC ? uint2{((const u32 *)from)[g], 0} : ((const uint2 *)from)[g];
    };

    const u32 ones[4] = {ONE, ONE_RAISED, ONE, ONE_RAISED};
    float total[TILES][BATCHES][2][KEPT] = {}; // rows g and g+8
    uint2 row_scales[TILES];
    auto compute = [&](const char *slot_pointer) {
        const u32 slot = shared_address(slot_pointer);
        wait_for_copies<2 * STAGES - 1>();
        __syncwarp();
        const float unit = SCALED ? scale_down(slot_pointer + X_AT, lane) : 1;
        uint4 b[COLUMNS == 1 ? 4 * PARTS : 1][BATCHES];
        float group_sums[PARTS * GROUPS];
        if (COLUMNS == 1) { // all columns of operand B are the row of x; only the first result is used
            UNROLL for (int i = 0; i < 4 * PARTS; i++) b[i][0] = load16(slot + X_AT + (4 * i + t) * 16);
            // With 8 k-steps as the 8 columns one mma sums 128 activations; lane t gets the sum of a pair of steps.
            UNROLL for (int part = 0; part < PARTS; part++) {
                float own[4] = {};
                uint2 steps = load8(slot + X_AT + part * 256 + g / 2 * 64 + t * 16 + g % 2 * 8);
                mma<BRAIN>(own, ones, steps.x, steps.y);
                float sum = own[0] + own[1];
                if (PAIRS > 1) sum += __shfl_xor_sync(~0u, sum, 1);
                if (PAIRS > 2) sum += __shfl_xor_sync(~0u, sum, 2);
                UNROLL for (int p = 0; p < 4; p += PAIRS)
                    group_sums[(4 * part + p) / PAIRS] = PAIRS < 4 ? __shfl_sync(~0u, sum, p, 4) : sum;
            }
        }
        wait_for_copies<2 * STAGES - 2>();
        __syncwarp();
        UNROLL for (int part = 0; part < PARTS; part++) {
            uint4 words[TILES][LOADS];
            UNROLL for (int r = 0; r < TILES; r++)
                UNROLL for (int i = 0; i < LOADS; i++)
                    words[r][i] = load16(slot + r * CODE_BYTES + (part * LOADS + i) * 512 + lane * 16);
            UNROLL for (int group = part * GROUPS; group < (part + 1) * GROUPS; group++) {
                float c[TILES][CHAINS][BATCHES][4] = {}, sums[BATCHES][4] = {}; // sums of codes times x, and of x
                UNROLL for (int pair = group * PAIRS; pair < (group + 1) * PAIRS; pair++) {
                    auto &operand = b[COLUMNS == 1 ? pair : 0];
                    UNROLL for (int n = 0; n < (COLUMNS > 1 ? BATCHES : 0); n++) {
                        u32 row = min(8 * n + g, M - 1); // columns beyond M repeat the last one and are dropped
                        operand[n] = load16(slot + X_AT + row * CHUNK * 2 + ((4 * pair + t) ^ (row & 1) << 2) * 16);
                        mma<BRAIN>(sums[n], ones, operand[n].x, operand[n].y);
                        mma<BRAIN>(sums[n], ones, operand[n].z, operand[n].w);
                    }
                    UNROLL for (int r = 0; r < TILES; r++) multiply(c[r], words[r], pair % 4, operand);
                }
                if (COLUMNS == 1) sums[0][0] = group_sums[group], sums[0][2] = sums[0][0] * (1 << RAISED);
                const char *scales = slot_pointer + SCALES_AT + group * GROUP_BYTES;
                UNROLL for (int r = 0; r < TILES; r++)
                    scale(total[r], c[r], sums, GROUP ? scales_of(scales + r * SCALE_BYTES) : row_scales[r], unit);
            }
        }
    };

    UNROLL for (int stage = 0; stage < STAGES; stage++) load(shared_address(ring + stage * SLOT));
#if SPLITS > 1
    __shared__ __align__(8) u64 received;
    const u32 arrived = shared_address(&received);
    if (rank == 0 && threadIdx.x == 0) expect_bytes(arrived, (SPLITS - 1) * WARPS * OUTPUTS * 4);
    cluster_arrive();
#endif
    UNROLL for (u32 r = 0; r < (GROUP ? 0 : TILES); r++)
        row_scales[r] = scales_of(scale_zero + (u64)(tile + min(r, tiles_left)) * TILE_SCALE_BYTES);
    for (u32 chunk = worker, at = 0; CHUNKS == WORKERS || chunk < CHUNKS; chunk += WORKERS) {
        compute(ring + at);
        if (CHUNKS <= WORKERS) break;
        __syncwarp();
        load(shared_address(ring + at));
        at = at == (STAGES - 1) * SLOT ? 0 : at + SLOT;
    }

#if RANK
    correction.load();
#endif

    // The cluster's first block collects all workers' sums in its shared memory and adds them up.
#if SPLITS > 1
    cluster_wait(); // the first block has started
#endif
    UNROLL for (int r = 0; r < TILES; r++)
        UNROLL for (int n = 0; n < BATCHES; n++)
            UNROLL for (int half = 0; half < 2; half++)
                UNROLL for (int k = 0; k < KEPT; k++) {
                    if (COLUMNS == 1 && t > 0) continue;
                    int column = COLUMNS == 1 ? 0 : 8 * n + 2 * t + k;
                    float *to = &partial[worker][(r * COLUMNS + column) * 16 + 8 * half + g];
                    float value = total[r][n][half][k] * (half ? UNITS_RAISED : UNITS);
#if SPLITS > 1
                    if (rank) send(shared_address(to), value, arrived, 0); else
#endif
                    *to = value;
                }
#if SPLITS > 1
    if (rank) {
        end_behind_head();
        return;
    }
    wait_for_bytes(arrived);
#endif
    __syncthreads();
    UNROLL for (int start = 0; start < OUTPUTS; start += 32 * WARPS) {
        u32 i = start + threadIdx.x, row = (tile + i / (16 * COLUMNS)) * 16 + i % 16, column = i / 16 % COLUMNS;
        if (i >= OUTPUTS || row >= N || column >= M) continue;
        float sum[4] = {};
        UNROLL for (int w = 0; w < WORKERS; w++) sum[w % 4] += partial[w][i];
#if RANK
        wait_for_launch_before();
        sum[0] += correction.value();
#endif
        const float output_sum = (sum[0] + sum[1]) + (sum[2] + sum[3]);
#if RANKS
        wait_for_launch_before();
        peers.give(row, output_sum);
#else
        y[(u64)column * N + row] = to_half<BF16>(output_sum);
#endif
    }
    end_behind_head();
}
