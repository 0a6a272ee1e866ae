// Fuzzes loading: whatever bytes a file holds, it is refused, or loaded whole and then usable, and
// no more memory is taken than the corpus may have and the file accounts for.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <vector>

#include "check_tree.h"
#include "corpus.h"
#include "input.h"
#include "saved_file.h"

// As in sanitizer/allocator_interface.h, which not every compiler ships.
extern "C" {
int __sanitizer_install_malloc_and_free_hooks(void (*taken)(const volatile void*, std::size_t),
                                              void (*given)(const volatile void*));
std::size_t __sanitizer_get_allocated_size(const volatile void* memory);
}

namespace {

using namespace ngram;
using namespace ngram::fuzz;

const Options kOptions{
    .max_bytes = 256 << 10, .max_external_bytes = 256 << 10, .max_candidates = 8, .max_steps = 32};

// A log of one page takes memory for many; reading takes a block.
constexpr std::uint64_t kMoreBytes = 1 << 20;

std::vector<Token> random_tokens(std::mt19937& random, std::size_t size) {
  std::vector<Token> tokens(size);
  for (Token& token : tokens) token = static_cast<Token>(random() % 5);
  return tokens;
}

void fill(Corpus& corpus, std::uint32_t seed, std::size_t documents) {
  std::mt19937 random(seed);
  for (std::size_t i = 0; i < documents; ++i) {
    corpus.insert(random_tokens(random, random() % 80), random() % 3);
  }
  const std::vector<std::int64_t> once{1}, offsets{0, 3};
  corpus.open(1, 1, random_tokens(random, 40));
  for (int i = 0; i < 5; ++i) {
    corpus.propose(once, std::vector<std::int32_t>{8}, 0);
    corpus.extend(once, random_tokens(random, 3), offsets);
  }
  corpus.close(1);
}

Bytes make_saved(std::size_t documents) {
  Corpus corpus(kOptions);
  fill(corpus, 1, documents);
  std::mt19937 random(2);
  corpus.add_external("notes", random_tokens(random, 100), std::vector<std::int64_t>{0, 40, 100});
  corpus.add_external("empty", {}, std::vector<std::int64_t>{0});
  return saved(corpus);
}

// The same with a checksum that agrees.
Bytes sealed(const Bytes& bytes) {
  const std::size_t payload = bytes.size() - std::min(bytes.size(), sizeof(std::uint64_t));
  ScratchFile file;
  ByteWriter writer(file.descriptor());
  writer.put_bytes(bytes.data(), payload);
  writer.finish();
  return file.written();
}

// A saved corpus, changed here and there.
Bytes damaged(Input& input) {
  static const std::array<Bytes, 3> good = {make_saved(0), make_saved(20), make_saved(600)};
  Bytes bytes = good[input.below(good.size())];
  const bool seal = input.below(4) != 0;
  const std::uint32_t cut = input.below(8);
  while (!input.empty()) {
    std::size_t at = input.integer<std::uint16_t>();
    // Anywhere, at the beginning, or behind the calibration, where the first sizes are.
    constexpr std::size_t kSizes = sizeof(Calibration) + 36;
    at = at % 3 == 0 ? (at << 8 | input.byte()) : at % 96 + (at % 3 == 1 ? 0 : kSizes);
    at %= bytes.size();
    auto value = input.pick(std::array<std::uint64_t, 4>{0, 1, ~std::uint64_t{0}, 1u << 24});
    if (input.below(2) != 0) value = input.integer<std::uint64_t>();
    const std::size_t width = input.pick(std::array<std::size_t, 4>{1, 2, 4, 8});
    for (std::size_t i = at; i < std::min(at + width, bytes.size()); ++i, value >>= 8) {
      bytes[i] = static_cast<unsigned char>(value);
    }
    if (cut == 0) bytes.resize(std::max<std::size_t>(at, 1));
    if (cut == 1) bytes.insert(bytes.end(), width, 0);
  }
  return seal ? sealed(bytes) : bytes;
}

// Bytes taken since begin(), at the most.
class Allocations {
 public:
  static void begin() {
    static const int installed = __sanitizer_install_malloc_and_free_hooks(taken, given);
    CHECK(installed != 0);
    now_ = most_ = 0;
  }
  static std::int64_t most() { return most_; }

 private:
  static void taken(const volatile void*, std::size_t size) {
    now_ += static_cast<std::int64_t>(size);
    most_ = std::max(most_, now_);
  }
  static void given(const volatile void* memory) {
    now_ -=
        static_cast<std::int64_t>(__sanitizer_get_allocated_size(const_cast<const void*>(memory)));
  }

  inline static std::int64_t now_ = 0, most_ = 0;
};

void use(Corpus& corpus) {
  std::mt19937 random(3);
  corpus.open(9, 1, random_tokens(random, 100));
  for (int i = 0; i < 20; ++i) {
    const auto text = random_tokens(random, 40);
    check_shape(corpus.query(random() % 4, text, 63, 0), 0, 63);
  }
  corpus.close(9);
  fill(corpus, 4, 300);  // over all pages
  CHECK(corpus.check().empty());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input({data, size});
  const Bytes bytes = input.below(8) == 0 ? Bytes(data, data + size) : damaged(input);
  Corpus corpus(kOptions);
  std::mt19937 random(5);
  corpus.insert(random_tokens(random, 100), 1);
  const Bytes before = saved(corpus);
  Allocations::begin();
  try {
    load(corpus, bytes);
  } catch (const std::invalid_argument&) {
    CHECK(Allocations::most() < static_cast<std::int64_t>(4 * bytes.size() + kMoreBytes));
    CHECK(saved(corpus) == before);
    return 0;
  }
  CHECK(Allocations::most() < static_cast<std::int64_t>(4 * bytes.size() + kMoreBytes));
  CHECK(corpus.check().empty());
  use(corpus);
  CHECK(corpus.num_bytes() <= kOptions.max_bytes + kOptions.max_external_bytes);
  return 0;
}
