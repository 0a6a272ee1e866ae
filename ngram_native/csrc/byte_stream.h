// Writes bytes to an open file and reads them, with a checksum at the end.
#ifndef NGRAM_NATIVE_BYTE_STREAM_H_
#define NGRAM_NATIVE_BYTE_STREAM_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace ngram {

// The checksum covers whole blocks, the last one padded with zeros.
inline constexpr std::size_t kStreamBlock = 1 << 16;

// Throws std::system_error when the file cannot be written.
class ByteWriter {
 public:
  explicit ByteWriter(int descriptor) : descriptor_(descriptor) { block_.reserve(kStreamBlock); }

  void put_bytes(const void* data, std::size_t size);
  template <typename T>
  void put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    put_bytes(&value, sizeof(T));
  }
  void finish();  // the last block, then the checksum

 private:
  void flush();

  const int descriptor_;
  std::vector<std::byte> block_;
  std::uint64_t checksum_ = 0;
};

// Throws std::invalid_argument when the file ends early, std::system_error when it cannot be read.
class ByteReader {
 public:
  explicit ByteReader(int descriptor);

  void get_bytes(void* data, std::size_t size);
  template <typename T>
  T get() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value;
    get_bytes(&value, sizeof(T));
    return value;
  }
  // Refuses a size that the file cannot hold, before memory is allocated for it.
  void expect(std::uint64_t bytes) const;
  // Refuses bytes left over and a checksum that does not agree.
  void finish();

 private:
  void refill();

  const int descriptor_;
  std::uint64_t remaining_;  // payload not handed out yet
  std::uint64_t unread_;     // payload not in the block yet
  std::vector<std::byte> block_;
  std::size_t used_ = 0;
  std::uint64_t checksum_ = 0;
};

}  // namespace ngram

#endif  // NGRAM_NATIVE_BYTE_STREAM_H_
