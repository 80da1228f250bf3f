// The latent vectors of up to three error compensators of one input x [K] (SPEAR, equation 3), which the product with
// the weight adds up in its epilogue (wna16_gemv.cu, correction.cuh). Method: compensated_gemv.py.
//
//     latent[e] = s_B (gamma(z) z),    z = s_A (A x),    gamma(z) = 1 + tanh(W2 relu(W1 z + b1) + b2)
//
// Compile-time constants (-D): K, a multiple of 8; RANK, a multiple of 16; HIDDEN, of which the gate has RANK each
// (0: gamma is 1); BF16 0 1 (else float16); SPLITS thread blocks of a cluster, which share the columns of one A.
//
// With RANKS the columns of x are one rank's, and z is not whole before all ranks' are added up: it goes to the peers as it
// is, without gate and s_B, behind the product's outputs (peers.cuh, row_parallel.cu).
//
// The product is launched beside this launch and reads its weights meanwhile; it waits before it reads `latent`.

#include "gate.cuh"
#if RANKS
#include "peers.cuh"
#endif

constexpr u32 THREADS = 256, TEAMS = THREADS / 16; // a team of 16 lanes has every TEAMS-th row of A
constexpr u32 ROWS = RANK / TEAMS;                 // of a team
constexpr u32 PIECES = (K + 15) / 16;              // of 16 columns, of which A has whole ones
constexpr u32 SHARE = (PIECES + SPLITS - 1) / SPLITS;
constexpr u32 WIDTH = HIDDEN * RANK;               // of the gate's hidden layer
constexpr u32 GATE = 2 * WIDTH * RANK + WIDTH + RANK; // values of a gate: W1 [WIDTH, RANK], W2 [RANK, WIDTH], b1, b2
constexpr u32 Z_AT = SPLITS * RANK * 4, HIDDEN_AT = Z_AT + RANK * 4, GATE_AT = HIDDEN_AT + WIDTH * 4; // shared memory

INLINE float byte_of(u32 word, int i) { return (float)(signed char)(word >> 8 * i); }

extern "C" __global__ void __cluster_dims__(SPLITS) __launch_bounds__(THREADS)
compensator_latent(const char *__restrict__ down, const u16 *__restrict__ gates, const float *__restrict__ scales,
                   const u16 *__restrict__ x, float *__restrict__ latent
#if RANKS
                   , PEERS_TAKEN
#endif
) {
    extern __shared__ __align__(128) char shared[]; // A x of each block, z, the hidden layer, the gate
    auto parts = (float (*)[RANK])shared;
    auto z = (float *)(shared + Z_AT), hidden = (float *)(shared + HIDDEN_AT);
    const u32 thread = threadIdx.x, lane = thread % 16, team = thread / 16;
    const u32 rank = blockIdx.x % SPLITS, which = blockIdx.x / SPLITS;
    __shared__ __align__(8) u64 received;
    const u32 arrived = shared_address(&received);
    begin_next();
    if (rank == 0 && thread == 0) expect_bytes(arrived, (SPLITS - 1) * RANK * 4);
    cluster_arrive();
    if (rank == 0)
        for (u32 i = thread; i < GATE / 8 * (HIDDEN > 0); i += THREADS)
            copy(shared_address(shared + GATE_AT) + i * 16, gates + (u64)which * GATE + i * 8, true, false);
    end_of_copies();

    const char *rows = down + ((u64)which * RANK + team) * (PIECES * 16);
    float sums[ROWS] = {};
    UNROLL for (u32 i = 0; i < SHARE; i += 16) {
        const u32 piece = rank * SHARE + i + lane;
        if (i + lane >= SHARE || piece >= PIECES) continue;
        uint4 codes[ROWS], values[2];
        UNROLL for (u32 r = 0; r < ROWS; r++) codes[r] = load_early(rows + (u64)r * TEAMS * (PIECES * 16) + piece * 16);
        values[0] = load_early(x + piece * 16);
        values[1] = piece * 16 + 8 < K ? load_early(x + piece * 16 + 8) : uint4{0, 0, 0, 0};
        UNROLL for (int column = 0; column < 16; column++) {
            const float v = to_float<BF16>((&values[column / 8].x)[column % 8 / 2] >> 16 * (column % 2));
            UNROLL for (u32 r = 0; r < ROWS; r++) sums[r] += v * byte_of((&codes[r].x)[column / 4], column % 4);
        }
    }
    cluster_wait(); // the first block has started
    UNROLL for (u32 r = 0; r < ROWS; r++) {
        UNROLL for (int mask = 8; mask > 0; mask /= 2) sums[r] += __shfl_xor_sync(~0u, sums[r], mask);
        float *to = &parts[rank][r * TEAMS + team];
        if (lane > 0) continue;
        if (rank) send(shared_address(to), sums[r], arrived, 0);
        else *to = sums[r];
    }
    if (rank) return;
    wait_for_bytes(arrived);
    wait_for_copies<0>();
    __syncthreads();
    const float *scale = scales + (u64)which * 2 * RANK; // of rows of A, then of columns of B
    if (thread < RANK) {
        float sum = 0;
        UNROLL for (int i = 0; i < SPLITS; i++) sum += parts[i][thread];
        z[thread] = sum * __ldg(scale + thread);
    }
#if RANKS
    const Peers peers = PEERS_GIVEN;
    if (thread < RANK) peers.give(thread, z[thread]);
    return;
#endif
    __syncthreads();
    scale_and_gate<RANK, WIDTH, THREADS>(shared + GATE_AT, scale + RANK, z, hidden, latent + which * RANK, thread);
}
