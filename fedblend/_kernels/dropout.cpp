// Dropout masks from the random numbers of PyTorch's generator: MT19937, two words for each number.

#include <cstdint>

namespace {

constexpr int WORDS = 624, AHEAD = 397;

// The state of a stream between calls: its words, and the number of used words.
struct Stream {
    uint32_t words[WORDS];
    uint32_t used;
};

inline uint32_t twisted(uint32_t word, uint32_t next, uint32_t ahead) {
    const uint32_t mixed = (word & 0x80000000u) | (next & 0x7fffffffu);
    return ahead ^ (mixed >> 1) ^ ((next & 1u) ? 0x9908b0dfu : 0u);
}

// Replace the 624 words by the next ones.
void renew(uint32_t* words) {
#pragma GCC ivdep
    for (int i = 0; i < WORDS - AHEAD; i++) words[i] = twisted(words[i], words[i + 1], words[i + AHEAD]);
    // The words that are read here were replaced 227 words before.
#pragma GCC ivdep
    for (int i = WORDS - AHEAD; i < WORDS - 1; i++)
        words[i] = twisted(words[i], words[i + 1], words[i + AHEAD - WORDS]);
    words[WORDS - 1] = twisted(words[WORDS - 1], words[0], words[AHEAD - 1]);
}

inline uint32_t tempered(uint32_t word) {
    word ^= word >> 11;
    word ^= (word << 7) & 0x9d2c5680u;
    word ^= (word << 15) & 0xefc60000u;
    return word ^ (word >> 18);
}

}  // namespace

extern "C" {

int stream_bytes() { return sizeof(Stream); }

void begin(uint32_t seed, Stream* stream) {
    stream->words[0] = seed;
    for (int i = 1; i < WORDS; i++) {
        const uint32_t last = stream->words[i - 1];
        stream->words[i] = 1812433253u * (last ^ (last >> 30)) + i;
    }
    stream->used = WORDS;
}

// mask[i] = kept if a random number of 53 bits is below `limit`, otherwise 0.
void draw(int64_t count, uint64_t limit, float kept, Stream* stream, float* mask) {
    while (count > 0) {
        if (stream->used == WORDS) {
            renew(stream->words);
            stream->used = 0;
        }
        const uint32_t* words = stream->words + stream->used;
        const int64_t left = (WORDS - stream->used) / 2, some = count < left ? count : left;
        for (int64_t i = 0; i < some; i++) {
            const uint64_t high = tempered(words[2 * i]) & 0x1fffffu, low = tempered(words[2 * i + 1]);
            mask[i] = (high << 32 | low) < limit ? kept : 0.0f;
        }
        stream->used += 2 * some;
        mask += some;
        count -= some;
    }
}

}  // extern "C"
