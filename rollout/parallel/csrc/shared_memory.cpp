#include "shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace rollout {
namespace {

[[noreturn]] void fail(int error, const char* call) {
  throw std::system_error(error, std::generic_category(), call);
}

struct flock lock_of(short type, long byte) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  return lock;
}

}  // namespace

SharedMemory SharedMemory::create(size_t bytes) {
  const int descriptor = memfd_create("specrollout-ranks", MFD_CLOEXEC);
  if (descriptor < 0) fail(errno, "memfd_create");
  if (const int error = posix_fallocate(descriptor, 0, static_cast<off_t>(bytes))) {
    close(descriptor);
    fail(error, "posix_fallocate");
  }
  return {descriptor, bytes};
}

SharedMemory SharedMemory::open(const std::string& path, size_t bytes) {
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (descriptor < 0) fail(errno, "open");
  struct stat found{};
  if (fstat(descriptor, &found) != 0 || found.st_size != static_cast<off_t>(bytes)) {
    close(descriptor);
    fail(ENXIO, "another file is there");
  }
  return {descriptor, bytes};
}

SharedMemory::SharedMemory(int descriptor, size_t bytes) : descriptor_(descriptor), bytes_(bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    close(descriptor);
    fail(error, "mmap");
  }
  data_ = static_cast<std::byte*>(data);
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      bytes_(other.bytes_),
      data_(std::exchange(other.data_, nullptr)) {}

SharedMemory::~SharedMemory() {
  if (data_ == nullptr) return;
  munmap(data_, bytes_);
  close(descriptor_);
}

std::string SharedMemory::path() const {
  return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(descriptor_);
}

void SharedMemory::lock(long byte) {
  struct flock lock = lock_of(F_WRLCK, byte);
  if (fcntl(descriptor_, F_SETLK, &lock) != 0) fail(errno, "fcntl");
}

void SharedMemory::unlock(long byte) {
  struct flock lock = lock_of(F_UNLCK, byte);
  fcntl(descriptor_, F_SETLK, &lock);
}

bool SharedMemory::is_locked(long byte) const {
  struct flock lock = lock_of(F_WRLCK, byte);
  if (fcntl(descriptor_, F_GETLK, &lock) != 0) fail(errno, "fcntl");
  return lock.l_type != F_UNLCK;
}

}  // namespace rollout
