// What the parts of the emulator share: a block's threads, and copies, boxes and products that are still to come.
#include <setjmp.h>
#include <ucontext.h>

#include <vector>

#include "emulated.h"

struct AsyncCopy {
    void *to;
    const void *from;
    // What is copied, and zeros behind it.
    int bytes, real;
};
// A tensor map: its array's address, the bytes of an element, and sizes, strides and box of four axes, as words
// (__init__.py). Of windows the box is channels and pixels, corners (lower and upper, 16 bits each, innermost axis
// first) and steps (16 bits each); of tiled boxes the steps are the last word.
struct Map {
    const unsigned char *address;
    long long itemsize, swizzle, sizes[4], strides[3], box[4], windows, steps;
};
// A box on its way to shared memory.
struct Box {
    unsigned to, barrier;
    Map map;
    int at[4], tap[2];
    // Instead of a map: so many bytes as they lie.
    const void *from = nullptr;
    unsigned bytes = 0;
};
// A box on its way to global memory.
struct Store {
    unsigned from;
    Map map;
    int at[4];
};
// A matrix instruction of a warpgroup, of which each thread has its own sums.
struct Product {
    float *d;
    int sums;
    unsigned long long a, b;
    bool add;
};
// A barrier of some of a block's threads.
struct Named { int arrived = 0, turn = 0; };
struct Fiber : Thread {
    // Where it goes on. A context only begins it: to swap contexts is a system call.
    jmp_buf here;
    ucontext_t context;
    std::vector<char> stack;
    std::vector<std::vector<AsyncCopy>> groups{1};
    std::vector<std::vector<Product>> products{1};
    // Of boxes, by TMA.
    std::vector<std::vector<Store>> stores;
    // PAUSED: until other blocks of the cluster have run.
    enum State { READY, IN_BLOCK, IN_WARP, IN_CLUSTER, PAUSED, ENDED } state = READY;
};
// Blocks of a cluster run in turns, each until all of its threads wait for others of the cluster or have ended; a
// block's threads, shared memory and copies under way lie here while others run.
struct Block {
    std::vector<Fiber> fibers;
    std::vector<unsigned char> memory;
    std::vector<Box> boxes;
    std::vector<Named> named;
    Three index;
};
// Of the block that runs.
extern std::vector<Fiber> fibers;
extern std::vector<Block> cluster;
extern unsigned own_rank;

inline Fiber &fiber() { return static_cast<Fiber &>(*current); }
void wait_as(Fiber::State state);
// For what another thread does, asked for so often before: one of the block, or of its cluster.
void wait_in_turns(long long turns);
// Between kernels: boxes and barriers of the one before are gone, matrix instructions have this text.
bool boxes_on_their_way();
void forget_boxes();
void swap_boxes(std::vector<Box> &others);
void set_wgmma(const char *text);
