// Copies that are under way: cp.async, and TMA's boxes in both directions.
#include "fibers.h"

void copy_later(void *to, const void *from, int bytes, int real) {
    fiber().groups.back().push_back({to, from, bytes, real});
}
void cp_async_commit() { fiber().groups.emplace_back(); }
void wait_for_copies(int pending) {
    auto &groups = fiber().groups;
    while ((int)groups.size() - 1 > pending) {
        for (const AsyncCopy &copy : groups.front()) {
            memset(copy.to, 0, copy.bytes);
            memcpy(copy.to, copy.from, copy.real);
        }
        groups.erase(groups.begin());
    }
}

struct Barrier {
    short expected, missing;
    int bytes : 31;
    unsigned phase : 1;
};
static_assert(sizeof(Barrier) == 8);
static std::vector<Box> boxes;
// Of an address with a rank above it.
constexpr unsigned RANKLESS = (1 << 24) - 1;
inline Barrier &barrier_at(unsigned at) {
    aligned_or_fail<8>(memory + at);
    return *(Barrier *)(memory + at);
}
inline void barrier_settle(Barrier &b) {
    if (b.missing == 0 && b.bytes == 0) b.missing = b.expected, b.phase ^= 1;
}
void barrier_init(unsigned at, int arrivals) { barrier_at(at) = {(short)arrivals, (short)arrivals, 0, 0}; }
void barrier_arrive(unsigned at) {
    Barrier &b = barrier_at(at);
    if (--b.missing < 0) fail("too many arrive at a barrier");
    barrier_settle(b);
}
void barrier_expect(unsigned at, unsigned bytes) {
    barrier_at(at).bytes += bytes;
    barrier_arrive(at);
}
void barrier_arrive_in_cluster(unsigned at) {
    Barrier &b = *(Barrier *)place_in_block(memory + (at & RANKLESS), at >> 24);
    if (--b.missing < 0) fail("too many arrive at a barrier");
    barrier_settle(b);
}
void copy_box(unsigned to, const void *map, unsigned barrier, int c, int w, int h, int n) {
    aligned_or_fail<128>(memory + to);
    boxes.push_back({to, barrier, *(const Map *)map, {c, w, h, n}, {}});
}
void copy_bytes(unsigned to, const void *from, unsigned bytes, unsigned barrier) {
    if (to % 16 || (uintptr_t)from % 16 || bytes % 16 || !bytes) fail("bytes are copied by 16");
    boxes.push_back({to, barrier, {}, {}, {}, from, bytes});
}
void copy_pixels(unsigned to, const void *map, unsigned barrier, int c, int w, int h, int n, int tap_w, int tap_h) {
    copy_box(to, map, barrier, c, w, h, n);
    boxes.back().tap[0] = tap_w, boxes.back().tap[1] = tap_h;
}
static int of(long long word, int i) { return (short)(word >> 16 * i); }
// Pixels of windows, one behind the other; beyond a row's last window comes the next row's first. Each element's
// address in shared memory and in the array, or null.
template <class Each>
inline void for_windows(const Map &m, unsigned place, const int (&at)[4], const int (&tap)[2], Each each) {
    int w = at[1], h = at[2], n = at[3];
    const unsigned mask = m.swizzle / 16 - 1;
    if (place % (8 * m.swizzle) || m.swizzle < m.box[0] * m.itemsize) fail("windows come in rows of a pattern");
    // Rows of fewer bytes begin where whole ones do.
    for (int pixel = 0; pixel < m.box[1]; ++pixel, place += m.swizzle - m.box[0] * m.itemsize) {
        const long long x = w + tap[0], y = h + tap[1];
        for (int c = 0; c < m.box[0]; ++c, place += m.itemsize) {
            const bool there =
                x >= 0 && x < m.sizes[1] && y >= 0 && y < m.sizes[2] && n < m.sizes[3] && at[0] + c < m.sizes[0];
            const unsigned char *global =
                m.address + (at[0] + c) * m.itemsize + x * m.strides[0] + y * m.strides[1] + n * m.strides[2];
            each(memory + (place ^ (place >> 7 & mask) << 4), there ? const_cast<unsigned char *>(global) : nullptr);
        }
        if ((w += of(m.box[3], 0)) <= m.sizes[1] - 1 + of(m.box[2], 2)) continue;
        w = of(m.box[2], 0);
        if ((h += of(m.box[3], 1)) <= m.sizes[2] - 1 + of(m.box[2], 3)) continue;
        h = of(m.box[2], 1), ++n;
    }
}
// A box of tiled mode, the same.
template <class Each> inline void for_box(const Map &m, unsigned place, const int (&first)[4], Each each) {
    const int size = m.itemsize;
    // Hardware says of a box that begins within a piece that it is an illegal instruction.
    if ((uintptr_t)m.address % 16 || m.box[0] * size % 16 || first[0] * size % 16) fail("TMA takes pieces of 16 bytes");
    // Pieces of 16 bytes are swizzled by the rows of 128 bytes that they lie in.
    const unsigned mask = m.swizzle ? m.swizzle / 16 - 1 : 0;
    if (place % (8 * m.swizzle + 128 * !m.swizzle)) fail("a swizzled box begins where its pattern does");
    // Swizzled rows of fewer bytes begin where whole ones do.
    const int beside = m.swizzle ? m.swizzle - m.box[0] * size : 0;
    if (beside < 0) fail("a swizzled box has rows of a pattern at most");
    if (of(m.steps, 0) != 1) fail("TMA takes every element of the innermost axis");
    for (int n = 0; n < m.box[3]; n += of(m.steps, 3))
        for (int h = 0; h < m.box[2]; h += of(m.steps, 2))
            for (int w = 0; w < m.box[1]; w += of(m.steps, 1), place += beside)
                for (int c = 0; c < m.box[0]; ++c, place += size) {
                    const long long at[4] = {first[0] + c, first[1] + w, first[2] + h, first[3] + n};
                    bool there = true;
                    for (int axis = 0; axis < 4; ++axis) there &= at[axis] >= 0 && at[axis] < m.sizes[axis];
                    const unsigned char *global =
                        m.address + at[0] * size + at[1] * m.strides[0] + at[2] * m.strides[1] + at[3] * m.strides[2];
                    each(memory + (place ^ (place >> 7 & mask) << 4),
                         there ? const_cast<unsigned char *>(global) : nullptr);
                }
}
static void deliver(const Box &box, unsigned rank) {
    const Map &m = box.map;
    long long bytes = 0;
    const auto each = [&](unsigned char *place, const unsigned char *from) {
        unsigned char *const to = place_in_block(place, rank);
        if (from) memcpy(to, from, m.itemsize);
        else memset(to, 0, m.itemsize);
        bytes += m.itemsize;
    };
    for (long long stride : m.strides)
        if (stride % 16) fail("TMA takes strides of 16 bytes");
    if (box.from) memcpy(place_in_block(memory + box.to, rank), box.from, bytes = box.bytes);
    else if (m.windows) for_windows(m, box.to, box.at, box.tap, each);
    else for_box(m, box.to, box.at, each);
    Barrier &b = *(Barrier *)place_in_block(memory + box.barrier, rank);
    b.bytes -= bytes;
    barrier_settle(b);
}
// The last copy to other blocks of the cluster, too: there at once, so what they have yet to read is lost.
void multicast(unsigned short mask) {
    const Box box = boxes.back();
    if (!(mask >> own_rank & 1)) fail("a copy to others alone");
    for (unsigned rank = 0; mask >> rank; ++rank)
        if (rank != own_rank && mask >> rank & 1) deliver(box, rank);
}
void barrier_wait(unsigned at, unsigned phase) {
    for (long long turns = 0; barrier_at(at).phase == phase; ++turns) {
        if (turns > 100000 && cluster.size() == 1) fail("a barrier that nobody comes to");
        for (size_t i = 0; i < boxes.size();)
            if (boxes[i].barrier == at) deliver(boxes[i], own_rank), boxes.erase(boxes.begin() + i);
            else ++i;
        if (barrier_at(at).phase == phase) wait_in_turns(turns);
    }
}

void store_box(const void *map, unsigned from, int filter, int group, int pixel) {
    fiber().stores.back().push_back({from, *(const Map *)map, {filter, group, pixel, 0}});
}
void store_pixels(const void *map, unsigned from, int c, int w, int h, int n) {
    fiber().stores.back().push_back({from, *(const Map *)map, {c, w, h, n}});
}
void commit_stores() { fiber().stores.emplace_back(); }
void wait_for_boxes(int pending) {
    auto &groups = fiber().stores;
    while ((int)groups.size() - 1 > pending) {
        for (const Store &store : groups.front()) {
            const Map &m = store.map;
            const auto each = [&](const unsigned char *from, unsigned char *to) {
                if (to) memcpy(to, from, m.itemsize);
            };
            for (long long stride : m.strides)
                if (stride % 16) fail("TMA takes strides of 16 bytes");
            if ((uintptr_t)m.address % 16) fail("TMA takes addresses of 16 bytes");
            // Hardware says of such a store that it is an illegal instruction.
            if (store.at[0] < 0) fail("a store begins in front of its tensor");
            if (m.windows) for_windows(m, store.from, store.at, {0, 0}, each);
            else for_box(m, store.from, store.at, each);
        }
        groups.erase(groups.begin());
    }
}

bool boxes_on_their_way() { return !boxes.empty(); }
void forget_boxes() { boxes.clear(); }
void swap_boxes(std::vector<Box> &others) { boxes.swap(others); }

// Shared memory of a cluster.
unsigned char *place_in_block(const void *place, unsigned rank) {
    if (rank == own_rank) return (unsigned char *)place;
    if (rank >= cluster.size()) fail("a block outside its cluster");
    return cluster[rank].memory.data() + ((const unsigned char *)place - memory);
}
void send_bytes(unsigned to, unsigned barrier, const void *value, int bytes) {
    const unsigned rank = to >> 24;
    if (rank != barrier >> 24) fail("a block outside its cluster");
    memcpy(place_in_block(memory + (to & RANKLESS), rank), value, bytes);
    Barrier &b = *(Barrier *)place_in_block(memory + (barrier & RANKLESS), rank);
    b.bytes -= bytes;
    barrier_settle(b);
}
void barrier_wait_for_cluster(unsigned at, unsigned phase) {
    wait_as(Fiber::IN_CLUSTER);
    if (barrier_at(at).phase == phase) fail("less was sent than a barrier waits for");
    if (barrier_at(at).bytes) fail("more was sent than a barrier waits for");
}
