// Memory that processes of one host share.
#pragma once

#include <cstddef>
#include <string>

namespace rollout {

// The memory has no name in a file system: others open it through its maker's descriptor while the
// maker lives, so nothing is left behind, whoever dies.
//
// A process can hold the lock of a byte. The kernel takes it back when the process ends, however it
// ends, so others can tell whether it lives. Forks do not inherit locks.
//
// Errors are std::system_error.
class SharedMemory {
 public:
  // Zeroed, and allocated: a full host shows here and not as a signal at the first write.
  static SharedMemory create(size_t bytes);
  // `path`: the maker's path().
  static SharedMemory open(const std::string& path, size_t bytes);

  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&&) = delete;
  ~SharedMemory();

  std::byte* data() const { return data_; }
  // Where processes of the same user and process-id namespace open it.
  std::string path() const;

  void lock(long byte);
  void unlock(long byte);
  // Whether another process holds the lock.
  bool is_locked(long byte) const;

 private:
  SharedMemory(int descriptor, size_t bytes);

  int descriptor_;
  size_t bytes_;
  std::byte* data_;
};

}  // namespace rollout
