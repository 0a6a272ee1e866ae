#include "mapped_array.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <new>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif

namespace ngram {

namespace {

[[maybe_unused]] constexpr std::size_t kPiece = 256
                                                << 10;  // some 10 us of the process's memory lock

}  // namespace

std::size_t round_to_pages(std::size_t bytes) {
  static const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

#ifdef __SANITIZE_ADDRESS__

// The sanitizer guards the heap only.
void* map_pages(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  void* const memory = std::calloc(bytes, 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void unmap_pages(void* pages, std::size_t) noexcept { std::free(pages); }

#else

void* map_pages(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  void* const pages =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) throw std::bad_alloc();
  return pages;
}

void unmap_pages(void* pages, std::size_t bytes) noexcept {
  while (bytes > 0) {  // from the end, on page boundaries
    const std::size_t begin = (bytes - 1) / kPiece * kPiece;
    ::munmap(static_cast<std::byte*>(pages) + begin, bytes - begin);
    bytes = begin;
  }
}

#endif

}  // namespace ngram
