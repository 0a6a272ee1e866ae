// A main for fuzz targets where libFuzzer is not to be had: replays the files it is given, or makes
// inputs from a seed, keeps those that reach new code and changes them further.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "coverage.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

// Whatever a sanitizer finds ends in abort(), so one signal handler keeps the input.
extern "C" const char* __asan_default_options() { return "abort_on_error=1"; }
extern "C" const char* __ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }

namespace {

using Bytes = std::vector<std::uint8_t>;

constexpr std::size_t kMaxInput = 4096;
constexpr unsigned kMaxSeconds = 20;  // of one input; more is a hang

// Signal handlers can be handed no state.
const Bytes* under_way = nullptr;
const char* program = "";
std::string failing_path;

void keep_input() {
  if (under_way == nullptr) return;
  const int file = ::open(failing_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (file < 0 || ::write(file, under_way->data(), under_way->size()) < 0) {
    std::fprintf(stderr, "the input cannot be written to %s\n", failing_path.c_str());
    return;
  }
  ::close(file);
  std::fprintf(stderr, "the input is in %s; replay it with\n  %s %s\n", failing_path.c_str(),
               program, failing_path.c_str());
  under_way = nullptr;
}

void on_signal(int signal) {
  if (signal == SIGALRM) std::fprintf(stderr, "one input took over %u seconds\n", kMaxSeconds);
  keep_input();
  std::_Exit(1);
}

void run(const Bytes& input) {
  under_way = &input;
  ::alarm(kMaxSeconds);
  // Memory of exactly that size, so that reading past it is seen.
  const Bytes exact(input.begin(), input.end());
  LLVMFuzzerTestOneInput(exact.data(), exact.size());
  ::alarm(0);
  under_way = nullptr;
}

Bytes changed(Bytes bytes, const std::vector<Bytes>& pool, std::mt19937_64& random) {
  const auto place = [&] {
    return bytes.begin() + static_cast<long>(random() % (bytes.size() + 1));
  };
  for (std::uint64_t changes = 1 + random() % 8; changes > 0; --changes) {
    switch (random() % 6) {
      case 0:
        if (!bytes.empty()) bytes[random() % bytes.size()] = static_cast<std::uint8_t>(random());
        break;
      case 1:
        if (!bytes.empty()) bytes[random() % bytes.size()] ^= 1u << random() % 8;
        break;
      case 2: {
        Bytes fresh(random() % 32);
        for (auto& byte : fresh) byte = static_cast<std::uint8_t>(random());
        bytes.insert(place(), fresh.begin(), fresh.end());
        break;
      }
      case 3: {
        auto begin = place(), end = place();
        if (begin > end) std::swap(begin, end);
        bytes.erase(begin, std::min(end, begin + 64));
        break;
      }
      case 4: {  // part of another
        const Bytes& other = pool[random() % pool.size()];
        if (other.empty()) break;
        const auto from = other.begin() + static_cast<long>(random() % other.size());
        bytes.insert(place(), from, other.end());
        break;
      }
      default: {  // part of its own, again
        const Bytes own = bytes;
        if (own.empty()) break;
        const auto from = static_cast<long>(random() % own.size());
        bytes.insert(place(), own.begin() + from,
                     own.begin() + std::min<long>(from + 64, static_cast<long>(own.size())));
      }
    }
  }
  bytes.resize(std::min(bytes.size(), kMaxInput));
  return bytes;
}

void fuzz(std::uint64_t seed, double seconds, std::uint64_t max_inputs) {
  using Clock = std::chrono::steady_clock;
  std::mt19937_64 random(seed);
  std::vector<Bytes> pool(1);
  std::uint64_t inputs = 0;
  const auto begin = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  for (; inputs < max_inputs && elapsed() < seconds; ++inputs) {
    Bytes input = changed(pool[random() % pool.size()], pool, random);
    run(input);
    if (ngram::fuzz::saw_something_new()) pool.push_back(std::move(input));
  }
  std::printf("%s: %llu inputs in %.0f s, %.0f a second; %zu reached new code; seed %llu\n",
              program, static_cast<unsigned long long>(inputs), elapsed(),
              static_cast<double>(inputs) / elapsed(), pool.size() - 1,
              static_cast<unsigned long long>(seed));
}

[[noreturn]] void usage() {
  std::fprintf(stderr,
               "usage: %s [--seconds S | --inputs N] [--seed N] [--failing FILE] | INPUT...\n",
               program);
  std::exit(2);
}

}  // namespace

int main(int argc, char** argv) {
  program = argv[0];
  failing_path = std::string(program) + ".failing";
  double seconds = 10;
  std::uint64_t inputs = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t seed = 1;
  std::vector<std::string> files;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.rfind("--", 0) != 0) {
      files.push_back(argument);
    } else if (i + 1 == argc) {
      usage();
    } else if (argument == "--seconds") {
      seconds = std::atof(argv[++i]);
    } else if (argument == "--inputs") {
      inputs = std::strtoull(argv[++i], nullptr, 10);
      seconds = std::numeric_limits<double>::infinity();
    } else if (argument == "--seed") {
      seed = std::strtoull(argv[++i], nullptr, 10);
    } else if (argument == "--failing") {
      failing_path = argv[++i];
    } else {
      usage();
    }
  }
  if (files.empty()) {
    std::signal(SIGABRT, on_signal);
    std::signal(SIGALRM, on_signal);
    fuzz(seed, seconds, inputs);
  }
  for (const std::string& path : files) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
      std::fprintf(stderr, "%s cannot be read\n", path.c_str());
      return 2;
    }
    run(Bytes(std::istreambuf_iterator<char>(file), {}));
    std::printf("%s: passes\n", path.c_str());
  }
}
