// A grid: its blocks one after the other, a block's threads in turns.
#include <cstdio>
#include <cstdlib>

#include "fibers.h"

Three blockIdx, blockDim, gridDim;
unsigned char memory[MOST_SHARED];
Thread *current;
std::vector<Fiber> fibers;
std::vector<Block> cluster;
unsigned own_rank;
static jmp_buf scheduler;
static void (*entry)(const void *);
static const void *parameters;

void fail(const char *why) {
    fprintf(stderr, "block %u %u %u, thread %u: %s\n", blockIdx.x, blockIdx.y, blockIdx.z, current->index.x, why);
    abort();
}
void wait_as(Fiber::State state) {
    fiber().state = state;
    if (!_setjmp(fiber().here)) _longjmp(scheduler, 1);
}
void wait_in_turns(long long turns) { wait_as(cluster.size() > 1 && turns > 8 ? Fiber::PAUSED : Fiber::READY); }
void __syncthreads() { wait_as(Fiber::IN_BLOCK); }
void __syncwarp(unsigned) { wait_as(Fiber::IN_WARP); }
void cluster_wait() { wait_as(Fiber::IN_CLUSTER); }
unsigned cluster_rank() { return own_rank; }
Thread *lane_of(int lane) { return &fibers[current->index.x / 32 * 32 + lane]; }

int __syncthreads_and(int value) {
    current->given[0] = value;
    __syncthreads();
    int all = 1;
    for (Fiber &fiber : fibers) all &= fiber.given[0] != 0;
    __syncthreads();
    return all;
}

// Named barriers of some of a block's threads.
constexpr int NAMED = 16;
static std::vector<Named> named(NAMED);
void arrive_part(int id, int threads) {
    if (++named.at(id).arrived == threads) named[id].arrived = 0, ++named[id].turn;
}
void sync_part(int id, int threads) {
    const int turn = named.at(id).turn;
    arrive_part(id, threads);
    for (int turns = 0; named[id].turn == turn; ++turns) {
        if (turns > 100000) fail("a part of a block that nobody completes");
        wait_in_turns(turns);
    }
}

// The next block's thread goes on where this one's has ended.
static void fiber_main() {
    for (;;) {
        entry(parameters);
        wait_as(Fiber::ENDED);
    }
}
static void begin(Fiber &fiber) {
    fiber.stack.resize(128 << 10);
    getcontext(&fiber.context);
    fiber.context.uc_stack = {fiber.stack.data(), 0, fiber.stack.size()};
    makecontext(&fiber.context, fiber_main, 0);
}
__attribute__((noinline)) static void go_on(Fiber &fiber) {
    current = &fiber;
    if (_setjmp(scheduler)) return;
    if (!fiber.stack.empty()) _longjmp(fiber.here, 1);
    begin(fiber);
    setcontext(&fiber.context);
}

// Forwards a block's last warp, which often brings or takes what others work on, has a turn for so many of theirs:
// what relies on its being quick goes wrong.
constexpr unsigned SLOW = 300;
// Runs a block until all of its threads wait for others of the cluster or have ended. `together`: all blocks have come
// to their cluster's barrier. Returns whether all of this one's have (IN_CLUSTER), or ended, or else PAUSED.
static Fiber::State run_block(unsigned threads, bool backwards, bool together) {
    for (Fiber &fiber : fibers)
        if (fiber.state == Fiber::PAUSED || (together && fiber.state == Fiber::IN_CLUSTER)) fiber.state = Fiber::READY;
    for (unsigned pass = 0;; ++pass) {
        bool ran = false, others = false;
        for (unsigned i = 0; i < threads; ++i) {
            Fiber &next = fibers[backwards ? threads - 1 - i : i];
            if (next.state != Fiber::READY) continue;
            const bool last = !backwards && i / 32 == (threads - 1) / 32;
            ran = true, others |= !last;
            if (!last || !others || pass % SLOW == 0) go_on(next);
        }
        // Who waits for a warp goes on when all of the warp's threads wait for it, and so with a block.
        for (unsigned first = 0; first < threads; first += 32) {
            unsigned waiting = 0, done = 0, of = threads - first < 32 ? threads - first : 32;
            for (unsigned t = first; t < first + of; ++t)
                waiting += fibers[t].state == Fiber::IN_WARP, done += fibers[t].state == Fiber::ENDED;
            if (waiting && waiting + done == of)
                for (unsigned t = first; t < first + of; ++t)
                    if (fibers[t].state == Fiber::IN_WARP) fibers[t].state = Fiber::READY, ran = true;
        }
        unsigned waiting = 0, ended = 0, in_cluster = 0, paused = 0;
        for (const Fiber &fiber : fibers)
            waiting += fiber.state == Fiber::IN_BLOCK, ended += fiber.state == Fiber::ENDED,
                in_cluster += fiber.state == Fiber::IN_CLUSTER, paused += fiber.state == Fiber::PAUSED;
        if (ended + in_cluster == threads) return in_cluster ? Fiber::IN_CLUSTER : Fiber::ENDED;
        if (!ran && paused) return Fiber::PAUSED;
        if (waiting && waiting + ended == threads) {
            for (Fiber &fiber : fibers)
                if (fiber.state == Fiber::IN_BLOCK) fiber.state = Fiber::READY;
        } else if (!ran) fail("threads wait for each other at different places");
    }
}

void run_grid(void (*kernel)(const void *), const void *p, const unsigned *grid, unsigned threads, unsigned shared,
              bool backwards, unsigned of_cluster, const char *wgmma) {
    entry = kernel, parameters = p;
    forget_boxes(), set_wgmma(wgmma);
    gridDim = {grid[0], grid[1], grid[2]}, blockDim = {threads, 1, 1};
    const unsigned char beyond = 0xa5;
    if (grid[0] % of_cluster) fail("a grid of no whole clusters");
    cluster.resize(of_cluster);
    for (unsigned z = 0; z < grid[2]; ++z)
        for (unsigned y = 0; y < grid[1]; ++y)
            for (unsigned number = 0; number < grid[0]; number += of_cluster) {
                const unsigned x = backwards ? grid[0] - of_cluster - number : number;
                for (unsigned rank = 0; rank < of_cluster; ++rank) {
                    Block &block = cluster[rank];
                    block.index = {x + rank, y, z};
                    block.memory.assign(shared + 1024, 0xff);
                    memset(block.memory.data() + shared, beyond, 1024);
                    block.fibers.resize(threads);
                    block.named.assign(NAMED, {});
                    for (unsigned t = 0; t < threads; ++t) {
                        Fiber &fiber = block.fibers[t];
                        fiber.index = {t, 0, 0}, fiber.state = Fiber::READY, fiber.groups.assign(1, {});
                        fiber.products.assign(1, {}), fiber.stores.assign(1, {});
                    }
                }
                // All of a cluster come to each of its barriers, or all end.
                unsigned ended = 0, together = of_cluster;
                for (int turns = 0; ended < of_cluster; ++turns) {
                    if (turns > 1000) fail("a barrier that nobody of the cluster comes to");
                    const bool all_came = together == of_cluster;
                    ended = together = 0;
                    for (unsigned i = 0; i < of_cluster; ++i) {
                        own_rank = backwards ? of_cluster - 1 - i : i;
                        Block &block = cluster[own_rank];
                        std::swap(fibers, block.fibers), std::swap(named, block.named), swap_boxes(block.boxes);
                        blockIdx = block.index;
                        memcpy(memory, block.memory.data(), shared + 1024);
                        const Fiber::State state = run_block(threads, backwards, all_came);
                        const bool all = state == Fiber::ENDED;
                        ended += all, together += state == Fiber::IN_CLUSTER;
                        if (state != Fiber::PAUSED && boxes_on_their_way()) fail("a box that nobody waits for");
                        for (int at = 0; at < 1024; ++at)
                            if (memory[shared + at] != beyond) fail("wrote beyond its shared memory");
                        memcpy(block.memory.data(), memory, shared + 1024);
                        // Shared memory of a block that has ended is another's.
                        if (all) memset(block.memory.data(), 0xff, shared);
                        std::swap(fibers, block.fibers), std::swap(named, block.named), swap_boxes(block.boxes);
                    }
                    if (ended && together) fail("some blocks of a cluster end, others wait for it");
                }
            }
}
