// The saved form of a corpus: magic, format, byte order, sizes, then the memory of each part as it
// lies, of external corpora the texts, so that a loaded corpus proposes what the saved one did. A
// checksum follows.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "byte_stream.h"
#include "corpus.h"
#include "external_index.h"
#include "mapped_array.h"
#include "validation.h"

namespace ngram {

namespace {

constexpr std::array<char, 8> kMagic = {'n', 'g', 'r', 'a', 'm', 'l', 'o', 'g'};
constexpr std::uint32_t kFormat = 2;  // raised whenever any saved structure changes
constexpr std::uint32_t kByteOrder = 0x01020304;

void put_string(ByteWriter& writer, const std::string& text) {
  writer.put(static_cast<std::uint64_t>(text.size()));
  writer.put_bytes(text.data(), text.size());
}

std::string get_string(ByteReader& reader) {
  const auto length = reader.get<std::uint64_t>();
  reader.expect(length);
  std::string text(static_cast<std::size_t>(length), '\0');
  reader.get_bytes(text.data(), text.size());
  return text;
}

struct LogSizes {
  std::uint32_t capacity_pages;
  std::uint32_t num_links;
  std::uint32_t part_slots;
  std::uint32_t num_pages;
  std::uint32_t oldest_slot;
};

// A byte that is neither 0 nor 1 must not be read as a bool.
bool flags_are_bools(const std::byte* page) {
  return page[offsetof(PageHeader, has_group)] <= std::byte{1} &&
         page[offsetof(PageHeader, starts_segment)] <= std::byte{1};
}

// Most heads of a young log are empty. Then only the others are saved, each with its index.
struct PlacedHead {
  std::uint32_t slot;
  std::uint32_t head;
};

void put_heads(ByteWriter& writer, std::span<const std::uint32_t> heads) {
  const auto taken = heads.size() - static_cast<std::size_t>(std::ranges::count(heads, 0u));
  const bool placed = taken * sizeof(PlacedHead) < heads.size_bytes();
  writer.put(static_cast<std::uint64_t>(placed ? taken : heads.size()));
  if (!placed) {
    writer.put_bytes(heads.data(), heads.size_bytes());
    return;
  }
  for (std::size_t slot = 0; slot < heads.size(); ++slot) {
    if (heads[slot] != 0) writer.put(PlacedHead{static_cast<std::uint32_t>(slot), heads[slot]});
  }
}

// The heads must all be empty.
void get_heads(ByteReader& reader, std::span<std::uint32_t> heads) {
  const auto count = reader.get<std::uint64_t>();
  if (count == heads.size()) {
    reader.get_bytes(heads.data(), heads.size_bytes());
    return;
  }
  if (count > heads.size()) {
    throw std::invalid_argument("the file is damaged: its sizes are impossible");
  }
  reader.expect(count * sizeof(PlacedHead));
  for (std::uint64_t i = 0; i < count; ++i) {
    const auto placed = reader.get<PlacedHead>();
    if (placed.slot >= heads.size()) {
      throw std::invalid_argument("the file is damaged: a chain head lies outside the table");
    }
    heads[placed.slot] = placed.head;
  }
}

void put_log(ByteWriter& writer, const ChainedLog& chained) {
  const TokenLog& log = chained.log();
  writer.put(LogSizes{log.capacity_pages(), log.num_links(), chained.part_slots(), log.num_pages(),
                      log.oldest_slot()});
  for (std::uint32_t slot = 0; slot < log.num_pages(); ++slot) {
    writer.put_bytes(log.raw_page(slot), TokenLog::page_bytes(log.num_links()));
  }
  put_heads(writer, {chained.heads(), chained.num_heads()});
}

// max_bytes: what the log may grow to, at most what it was created for.
std::unique_ptr<ChainedLog> get_log(ByteReader& reader, const std::vector<Chain>& chains,
                                    std::uint64_t max_bytes) {
  const auto sizes = reader.get<LogSizes>();
  if (sizes.num_links != chains.size() || sizes.part_slots < 1 ||
      sizes.num_pages > sizes.capacity_pages || sizes.capacity_pages < 1 ||
      sizes.capacity_pages > TokenLog::kMaxCapacityPages) {
    throw std::invalid_argument("the file is damaged: its sizes are impossible");
  }
  const std::size_t stride = TokenLog::page_bytes(sizes.num_links);
  const std::uint64_t table_bytes = ChainedLog::table_bytes(chains, sizes.part_slots);
  reader.expect(sizes.num_pages * std::uint64_t{stride});
  if (sizes.capacity_pages * std::uint64_t{stride} + table_bytes > max_bytes) {
    throw std::invalid_argument("the file holds a log larger than " + std::to_string(max_bytes) +
                                " bytes");
  }
  auto chained = std::make_unique<ChainedLog>(chains, sizes.capacity_pages, sizes.part_slots);
  chained->log().adopt_oldest_slot(sizes.oldest_slot);
  for (std::uint32_t i = 0; i < sizes.num_pages; ++i) {
    std::byte* page = chained->log().adopt_page();
    reader.get_bytes(page, stride);
    if (!flags_are_bools(page)) throw std::invalid_argument("the file is damaged: a page's flags");
  }
  chained->log().count_tokens();
  get_heads(reader, {chained->heads(), chained->num_heads()});
  return chained;
}

// Only the text of an external corpus is saved. Building its index again takes no longer than
// checking a stored one would, and gives the same index everywhere.
void put_text(ByteWriter& writer, std::span<const Token> text) {
  writer.put(static_cast<std::uint64_t>(text.size()));
  writer.put_bytes(text.data(), text.size_bytes());
}

MappedArray<Token> get_text(ByteReader& reader) {
  const auto size = reader.get<std::uint64_t>();
  if (size > ExternalIndex::kMaxText) {
    throw std::invalid_argument("the file is damaged: its sizes are impossible");
  }
  reader.expect(size * sizeof(Token));
  MappedArray<Token> text(static_cast<std::size_t>(size));
  reader.get_bytes(text.data(), text.size() * sizeof(Token));
  return text;
}

bool is_text(const MappedArray<Token>& text, std::int64_t vocab_size) {
  return text.size() > 0 && text[0] == ExternalIndex::kSeparator &&
         text[text.size() - 1] == ExternalIndex::kSeparator &&
         std::all_of(text.begin(), text.end(), [vocab_size](Token token) {
           return token >= ExternalIndex::kSeparator && token < vocab_size;
         });
}

}  // namespace

void Corpus::save(ByteWriter& writer) const {
  const std::scoped_lock lock(mutex_);
  writer.put(kMagic);
  writer.put(kFormat);
  writer.put(kByteOrder);
  put_string(writer, options_.vocabulary);
  writer.put(options_.max_bytes);
  writer.put(weight_version_);
  writer.put(policy_);
  writer.put(calibration_);
  put_log(writer, *live_);
  writer.put(static_cast<std::uint64_t>(externals_.by_name().size()));
  for (const auto& [name, external] : externals_.by_name()) {
    put_string(writer, name);
    put_text(writer, external->text());
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
  if (const std::string vocabulary = get_string(reader); vocabulary != options_.vocabulary) {
    throw std::invalid_argument("the file's tokens are of the vocabulary '" + vocabulary +
                                "', not of '" + options_.vocabulary + "'");
  }
  if (const auto max_bytes = reader.get<std::uint64_t>(); max_bytes != options_.max_bytes) {
    throw std::invalid_argument("the file was saved with max_bytes=" + std::to_string(max_bytes) +
                                ", load it into a corpus of that size, not " +
                                std::to_string(options_.max_bytes));
  }
  const auto weight_version = reader.get<std::int64_t>();
  const auto policy = reader.get<std::uint32_t>();
  auto calibration = reader.get<Calibration>();
  if (!calibration.settle()) {
    throw std::invalid_argument("the file is damaged: what it learned cannot have come about");
  }
  auto live = get_log(reader, Matcher::live_chains(), options_.max_bytes);
  // They have a budget of their own until they replace the published ones; loads under way go on.
  const auto budget = std::make_shared<ExternalBudget>(options_.max_external_bytes);
  ExternalCorpora externals;
  const auto num_externals = reader.get<std::uint64_t>();
  for (std::uint64_t i = 0; i < num_externals; ++i) {
    const std::string name = get_string(reader);
    if (externals.by_name().contains(name)) {
      throw std::invalid_argument("the file is damaged: two external corpora have one name");
    }
    MappedArray<Token> text = get_text(reader);
    if (!is_text(text, options_.vocab_size)) {
      throw std::invalid_argument("the file is damaged: an external corpus has no text");
    }
    try {
      BuildMonitor monitor(budget);
      externals.add(name, std::make_unique<ExternalIndex>(std::move(text), monitor));
    } catch (const std::invalid_argument&) {
      refuse("max_external_bytes", std::to_string(options_.max_external_bytes),
             "is too small for the file's external corpora");
    }
  }
  reader.finish();
  if (const std::string reason = live->check(options_.vocab_size); !reason.empty()) {
    throw std::invalid_argument("the file is damaged: " + reason);
  }

  const std::scoped_lock lock(mutex_);
  externals.charge_to(external_budget_);
  detach_sequences();
  live_.swap(live);
  std::swap(externals_, externals);
  calibration_ = calibration;
  weight_version_ = weight_version;
  policy_ = policy;
}

}  // namespace ngram
