#include "byte_stream.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "context.h"

namespace ngram {

namespace {

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

[[noreturn]] void damaged(const char* reason) {
  throw std::invalid_argument(std::string("the file ") + reason);
}

std::uint64_t fold(std::uint64_t checksum, const std::vector<std::byte>& block) {
  for (std::size_t i = 0; i < block.size(); i += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, block.data() + i, std::min(sizeof(word), block.size() - i));
    checksum = mix(checksum, word);
  }
  return mix(checksum, block.size());
}

void write_all(int descriptor, const std::byte* data, std::size_t size) {
  while (size > 0) {
    const ssize_t written = ::write(descriptor, data, size);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("write");
    data += written;
    size -= static_cast<std::size_t>(written);
  }
}

void read_all(int descriptor, std::byte* data, std::size_t size) {
  while (size > 0) {
    const ssize_t got = ::read(descriptor, data, size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("read");
    if (got == 0) damaged("is truncated");
    data += got;
    size -= static_cast<std::size_t>(got);
  }
}

}  // namespace

void ByteWriter::put_bytes(const void* data, std::size_t size) {
  const auto* bytes = static_cast<const std::byte*>(data);
  while (size > 0) {
    const std::size_t part = std::min(size, kStreamBlock - block_.size());
    block_.insert(block_.end(), bytes, bytes + part);
    bytes += part;
    size -= part;
    if (block_.size() == kStreamBlock) flush();
  }
}

void ByteWriter::flush() {
  checksum_ = fold(checksum_, block_);
  write_all(descriptor_, block_.data(), block_.size());
  block_.clear();
}

void ByteWriter::finish() {
  flush();
  write_all(descriptor_, reinterpret_cast<const std::byte*>(&checksum_), sizeof(checksum_));
}

ByteReader::ByteReader(int descriptor) : descriptor_(descriptor) {
  struct stat status;
  if (::fstat(descriptor, &status) != 0) fail("fstat");
  const auto size = static_cast<std::uint64_t>(status.st_size);
  if (size < sizeof(checksum_)) damaged("is truncated");
  remaining_ = unread_ = size - sizeof(checksum_);
}

void ByteReader::expect(std::uint64_t bytes) const {
  if (bytes > remaining_) damaged("is truncated");
}

void ByteReader::refill() {
  block_.resize(static_cast<std::size_t>(std::min<std::uint64_t>(unread_, kStreamBlock)));
  read_all(descriptor_, block_.data(), block_.size());
  unread_ -= block_.size();
  used_ = 0;
  checksum_ = fold(checksum_, block_);
}

void ByteReader::get_bytes(void* data, std::size_t size) {
  expect(size);
  auto* bytes = static_cast<std::byte*>(data);
  while (size > 0) {
    if (used_ == block_.size()) refill();
    const std::size_t part = std::min(size, block_.size() - used_);
    std::memcpy(bytes, block_.data() + used_, part);
    used_ += part;
    bytes += part;
    size -= part;
    remaining_ -= part;
  }
}

void ByteReader::finish() {
  if (remaining_ != 0) damaged("holds more than it should");
  if (block_.size() == kStreamBlock || block_.empty()) {
    block_.clear();
    checksum_ = fold(checksum_, block_);  // the writer's last block was empty
  }
  std::uint64_t stored = 0;
  read_all(descriptor_, reinterpret_cast<std::byte*>(&stored), sizeof(stored));
  if (stored != checksum_) damaged("is damaged: its checksum does not agree");
}

}  // namespace ngram
