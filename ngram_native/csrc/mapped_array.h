// A large array of zeroed memory from the system, given back a few pages at a time.
#ifndef NGRAM_NATIVE_MAPPED_ARRAY_H_
#define NGRAM_NATIVE_MAPPED_ARRAY_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace ngram {

// Zeroed memory in whole pages; throws std::bad_alloc when there is none.
void* map_pages(std::size_t bytes);

// Unmapping locks the whole process's memory for as long as its pages take, and every thread that
// touches a new page waits. So pages are unmapped a few at a time.
void unmap_pages(void* pages, std::size_t bytes) noexcept;

std::size_t round_to_pages(std::size_t bytes);

template <typename T>
class MappedArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  MappedArray() = default;
  explicit MappedArray(std::size_t size)
      : data_(static_cast<T*>(map_pages(size * sizeof(T)))), size_(size) {}
  ~MappedArray() { unmap_pages(data_, size_ * sizeof(T)); }
  MappedArray(MappedArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  MappedArray& operator=(MappedArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }

  T* data() { return data_; }
  const T* data() const { return data_; }
  std::size_t size() const { return size_; }
  T& operator[](std::size_t i) { return data_[i]; }
  const T& operator[](std::size_t i) const { return data_[i]; }
  T* begin() { return data_; }
  T* end() { return data_ + size_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }

  static std::size_t bytes_for(std::size_t size) { return round_to_pages(size * sizeof(T)); }
  std::size_t num_bytes() const { return bytes_for(size_); }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace ngram

#endif  // NGRAM_NATIVE_MAPPED_ARRAY_H_
