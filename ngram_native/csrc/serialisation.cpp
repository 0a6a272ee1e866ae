// The saved form of a corpus: magic, format, byte order, sizes, then the memory of each part as it
// lies, so that a loaded corpus proposes what the saved one did. A checksum follows.
#include <array>
#include <bit>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "byte_stream.h"
#include "corpus.h"

namespace ngram {

namespace {

constexpr std::array<char, 8> kMagic = {'n', 'g', 'r', 'a', 'm', 'l', 'o', 'g'};
constexpr std::uint32_t kFormat = 1;  // raised whenever any saved structure changes
constexpr std::uint32_t kByteOrder = 0x01020304;

struct LogSizes {
  std::uint32_t capacity_pages;
  std::uint32_t num_links;
  std::uint32_t part_slots;
  std::uint32_t num_pages;
  PageNumber oldest_page;
};

void put_log(ByteWriter& writer, const ChainedLog& chained) {
  const TokenLog& log = chained.log();
  writer.put(LogSizes{log.capacity_pages(), log.num_links(), chained.part_slots(), log.num_pages(),
                      log.oldest_page()});
  PageNumber page = log.oldest_page();
  for (std::uint32_t i = 0; i < log.num_pages(); ++i, page = log.successor(page)) {
    writer.put_bytes(log.raw_page(page), TokenLog::page_bytes(log.num_links()));
  }
  writer.put_bytes(chained.heads(), chained.num_heads() * sizeof(Position));
}

std::unique_ptr<ChainedLog> get_log(ByteReader& reader, const std::vector<Chain>& chains) {
  const auto sizes = reader.get<LogSizes>();
  if (sizes.num_links != chains.size() || sizes.part_slots < 1 ||
      sizes.num_pages > sizes.capacity_pages || sizes.capacity_pages < 1 ||
      sizes.capacity_pages > TokenLog::kMaxCapacityPages) {
    throw std::invalid_argument("the file is damaged: its sizes are impossible");
  }
  const std::size_t stride = TokenLog::page_bytes(sizes.num_links);
  reader.expect(sizes.num_pages * std::uint64_t{stride} +
                ChainedLog::table_bytes(chains, sizes.part_slots));
  auto chained = std::make_unique<ChainedLog>(chains, sizes.capacity_pages, sizes.part_slots);
  chained->log().begin_numbering_at(sizes.oldest_page);
  for (std::uint32_t i = 0; i < sizes.num_pages; ++i) {
    reader.get_bytes(chained->log().adopt_page(), stride);
  }
  chained->log().count_tokens();
  reader.get_bytes(chained->heads(), chained->num_heads() * sizeof(Position));
  return chained;
}

}  // namespace

void Corpus::save(ByteWriter& writer) const {
  const std::scoped_lock lock(mutex_);
  writer.put(kMagic);
  writer.put(kFormat);
  writer.put(kByteOrder);
  writer.put(options_.max_bytes);
  writer.put(weight_version_);
  writer.put(policy_);
  writer.put(calibration_);
  put_log(writer, *live_);
  writer.put(static_cast<std::uint64_t>(externals_.by_name().size()));
  for (const auto& [name, external] : externals_.by_name()) {
    writer.put(static_cast<std::uint64_t>(name.size()));
    writer.put_bytes(name.data(), name.size());
    put_log(writer, *external);
  }
  writer.finish();
}

void Corpus::load(ByteReader& reader) {
  if (reader.get<std::array<char, 8>>() != kMagic) {
    throw std::invalid_argument("the file is not a saved n-gram corpus");
  }
  if (const auto format = reader.get<std::uint32_t>(); format != kFormat) {
    throw std::invalid_argument("the file has format " + std::to_string(format) +
                                ", this release reads " + std::to_string(kFormat));
  }
  if (reader.get<std::uint32_t>() != kByteOrder) {
    throw std::invalid_argument("the file was saved on a machine of another byte order");
  }
  if (const auto max_bytes = reader.get<std::uint64_t>(); max_bytes != options_.max_bytes) {
    throw std::invalid_argument("the file was saved with max_bytes=" + std::to_string(max_bytes) +
                                ", load it into a corpus of that size, not " +
                                std::to_string(options_.max_bytes));
  }
  const auto weight_version = reader.get<std::int64_t>();
  const auto policy = reader.get<std::uint32_t>();
  const auto calibration = reader.get<Calibration>();
  auto live = get_log(reader, Matcher::live_chains());
  ExternalCorpora externals(options_.max_external_bytes);
  const auto num_externals = reader.get<std::uint64_t>();
  for (std::uint64_t i = 0; i < num_externals; ++i) {
    const auto length = reader.get<std::uint64_t>();
    reader.expect(length);
    std::string name(static_cast<std::size_t>(length), '\0');
    reader.get_bytes(name.data(), name.size());
    auto external = get_log(reader, ExternalCorpora::chains());
    externals.admit(name, external->num_bytes());
    externals.add(name, std::move(external));
  }
  reader.finish();
  std::string reason = live->check();
  for (const auto& [name, external] : externals.by_name()) {
    if (reason.empty()) reason = external->check();
  }
  if (!reason.empty()) throw std::invalid_argument("the file is damaged: " + reason);

  const std::scoped_lock lock(mutex_);
  detach_sequences();
  live_.swap(live);
  std::swap(externals_, externals);
  calibration_ = calibration;
  weight_version_ = weight_version;
  policy_ = policy;
}

}  // namespace ngram
