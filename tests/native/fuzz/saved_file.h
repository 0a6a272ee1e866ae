// Saved corpora as byte strings.
#ifndef NGRAM_NATIVE_TESTS_SAVED_FILE_H_
#define NGRAM_NATIVE_TESTS_SAVED_FILE_H_

#include <unistd.h>

#include <cstdio>
#include <memory>
#include <span>
#include <vector>

#include "byte_stream.h"
#include "check.h"
#include "corpus.h"

namespace ngram {

using Bytes = std::vector<unsigned char>;

// A file without a name.
class ScratchFile {
 public:
  int descriptor() const { return fileno(file_.get()); }
  void put(std::span<const unsigned char> bytes) {
    const auto size = static_cast<ssize_t>(bytes.size());
    CHECK(bytes.empty() || pwrite(descriptor(), bytes.data(), bytes.size(), 0) == size);
  }
  Bytes written() const {
    Bytes bytes(static_cast<std::size_t>(lseek(descriptor(), 0, SEEK_CUR)));
    CHECK(pread(descriptor(), bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
    return bytes;
  }

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::unique_ptr<std::FILE, Close> file_{std::tmpfile()};
};

inline Bytes saved(const Corpus& corpus) {
  ScratchFile file;
  ByteWriter writer(file.descriptor());
  corpus.save(writer);
  return file.written();
}

inline void load(Corpus& corpus, std::span<const unsigned char> bytes) {
  ScratchFile file;
  file.put(bytes);
  ByteReader reader(file.descriptor());
  corpus.load(reader);
}

}  // namespace ngram

#endif  // NGRAM_NATIVE_TESTS_SAVED_FILE_H_
