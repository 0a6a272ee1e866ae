// Times Corpus::extend without Python. Reads the calls that call_script.py wrote and prints, for
// each repetition, the tokens inserted and the CPU seconds of the extends.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <span>
#include <stdexcept>
#include <vector>

#include "corpus.h"

namespace {

class Script {
 public:
  explicit Script(const char* path) : file_(path, std::ios::binary) {
    file_.exceptions(std::ios::failbit | std::ios::badbit);
    for (auto* array :
         {&closed_offsets, &closed, &opened_offsets, &opened, &groups, &prompt_offsets}) {
      *array = read();
    }
    prompts = tokens(read());
    id_offsets = read();
    ids = read();
    counts = read();
    fresh = tokens(read());
  }

  std::vector<std::int64_t> closed_offsets, closed, opened_offsets, opened, groups, prompt_offsets;
  std::vector<ngram::Token> prompts;
  std::vector<std::int64_t> id_offsets, ids, counts;
  std::vector<ngram::Token> fresh;

 private:
  std::vector<std::int64_t> read() {
    std::int64_t size = 0;
    file_.read(reinterpret_cast<char*>(&size), sizeof(size));
    std::vector<std::int64_t> values(static_cast<std::size_t>(size));
    file_.read(reinterpret_cast<char*>(values.data()),
               size * static_cast<std::int64_t>(sizeof(size)));
    return values;
  }
  static std::vector<ngram::Token> tokens(const std::vector<std::int64_t>& values) {
    return {values.begin(), values.end()};
  }

  std::ifstream file_;
};

double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

std::size_t at(const std::vector<std::int64_t>& values, std::size_t i) {
  return static_cast<std::size_t>(values[i]);
}

// budget: nodes proposed before each call, not timed, which the tokens then judge.
double insert_all(const Script& script, std::uint64_t max_bytes, std::int32_t budget) {
  ngram::Options options{};
  options.max_bytes = max_bytes;
  options.max_external_bytes = 1 << 20;
  options.max_candidates = 12;
  options.max_steps = 4 * options.max_candidates;
  ngram::Corpus corpus(options);
  double seconds = 0;
  std::size_t begin = 0;
  std::vector<std::int64_t> offsets;
  for (std::size_t call = 0; call + 1 < script.id_offsets.size(); ++call) {
    for (std::size_t i = at(script.closed_offsets, call); i < at(script.closed_offsets, call + 1);
         ++i) {
      corpus.close(script.closed[i]);
    }
    for (std::size_t i = at(script.opened_offsets, call); i < at(script.opened_offsets, call + 1);
         ++i) {
      const std::size_t prompt = at(script.prompt_offsets, i);
      corpus.open(
          script.opened[i], static_cast<std::uint64_t>(script.groups[i]),
          std::span(script.prompts).subspan(prompt, at(script.prompt_offsets, i + 1) - prompt));
    }
    const std::size_t first = at(script.id_offsets, call);
    const std::size_t size = at(script.id_offsets, call + 1) - first;
    offsets.assign(1, 0);
    for (std::size_t b = 0; b < size; ++b) {
      offsets.push_back(offsets.back() + script.counts[first + b]);
    }
    const auto fresh = std::span(script.fresh).subspan(begin, at(offsets, size));
    begin += fresh.size();
    const auto ids = std::span(script.ids).subspan(first, size);
    if (budget > 0) corpus.propose(ids, std::vector<std::int32_t>(size, budget), 0.0);
    const double start = cpu_seconds();
    corpus.extend(ids, fresh, offsets);
    seconds += cpu_seconds() - start;
  }
  return seconds;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: %s SCRIPT MAX_BYTES BUDGET REPETITIONS\n", argv[0]);
    return 2;
  }
  const Script script(argv[1]);
  for (int i = 0; i < std::atoi(argv[4]); ++i) {
    const double seconds =
        insert_all(script, std::strtoull(argv[2], nullptr, 10), std::atoi(argv[3]));
    std::printf("%zu %.9f\n", script.fresh.size(), seconds);
  }
}
