#include "external_index.h"

#include <algorithm>
#include <utility>

namespace ngram {

namespace {

std::size_t first_slot(std::uint64_t hash, std::size_t slots) {
  return static_cast<std::size_t>((hash >> 32) * slots >> 32);
}

// The index in [0, size) that represents part k of `parts`. It lies at a hashed offset within the
// part: a fixed stride would see only one phase of a text that repeats itself.
std::size_t sample(std::size_t k, std::size_t parts, std::size_t size) {
  const std::size_t begin = k * size / parts, width = (k + 1) * size / parts - begin;
  return begin + static_cast<std::size_t>((mix(kHashSeed, k) >> 32) * width >> 32);
}

}  // namespace

ExternalIndex::ExternalIndex(MappedArray<Token> text, BuildMonitor& monitor)
    : text_(std::move(text)) {
  std::size_t positions = 0;
  for (std::size_t p = 1; p < text_.size(); ++p) {
    if (p % BuildMonitor::kStride == 0) monitor.checkpoint();
    num_tokens_ += text_[p] >= 0;
    positions += text_[p] >= 0 && text_[p - 1] >= 0;
  }
  const std::uint64_t held =
      text_.num_bytes() + order_.bytes_for(positions) + shared_.bytes_for(positions);
  monitor.hold(held + ContextSorter::scratch_bytes(positions));
  order_ = MappedArray<TextPosition>(positions);
  shared_ = MappedArray<std::uint8_t>(positions);
  TextPosition* next = order_.begin();
  for (std::size_t p = 1; p < text_.size(); ++p) {
    if (p % BuildMonitor::kStride == 0) monitor.checkpoint();
    if (text_[p] >= 0 && text_[p - 1] >= 0) *next++ = static_cast<TextPosition>(p);
  }
  ContextSorter(text_.data(), order_, shared_, monitor).sort();
  monitor.hold(held);
  for (std::uint32_t length = 1; length <= kTables; ++length) {
    tables_[length - 1] = make_table(length, monitor);
  }
  charge_ = monitor.take_charge();
}

ExternalIndex::Table ExternalIndex::make_table(std::uint32_t length, BuildMonitor& monitor) const {
  std::size_t intervals = 0;
  for_each_interval(length, [&](Interval) {
    if (++intervals % BuildMonitor::kStride == 0) monitor.checkpoint();
  });
  const std::size_t slots = intervals + intervals / 2 + 1;
  monitor.hold(monitor.num_bytes() + Table::bytes_for(slots));
  Table table(slots);
  for_each_interval(length, [&](Interval interval) {
    if (--intervals % BuildMonitor::kStride == 0) monitor.checkpoint();
    const ContextView context(&text_[order_[interval.begin]], length);
    std::size_t slot = first_slot(context.hash(length), slots);
    while (table[slot].size() > 0) slot = slot + 1 == slots ? 0 : slot + 1;
    table[slot] = interval;
  });
  return table;
}

template <typename Visit>
void ExternalIndex::for_each_interval(std::uint32_t length, Visit visit) const {
  std::size_t begin = 0;
  for (std::size_t i = 1; i <= order_.size(); ++i) {
    if (i < order_.size() && shared_[i] >= length) continue;
    // At a document's beginning a context may be too short.
    if (text_[order_[begin] - length] >= 0) {
      visit(Interval{static_cast<TextPosition>(begin), static_cast<TextPosition>(i)});
    }
    begin = i;
  }
}

ExternalIndex::Interval ExternalIndex::find_interval(ContextView context,
                                                     std::uint32_t length) const {
  if (context.size() < length) return {};
  const Table& table = tables_[length - 1];
  std::size_t slot = first_slot(context.hash(length), table.size());
  for (; table[slot].size() > 0; slot = slot + 1 == table.size() ? 0 : slot + 1) {
    if (match_length(order_[table[slot].begin], context, 0) >= length) return table[slot];
  }
  return {};
}

std::uint32_t ExternalIndex::match_length(TextPosition position, ContextView context,
                                          std::uint32_t known) const {
  // The separator before a document equals no token, so this stops there at the latest.
  std::uint32_t match = known;
  while (match < context.size() && text_[position - 1 - match] == context.back(match)) ++match;
  return match;
}

bool ExternalIndex::comes_before(TextPosition position, ContextView context,
                                 std::uint32_t known) const {
  const std::uint32_t match = match_length(position, context, known);
  return match < context.size() && text_[position - 1 - match] < context.back(match);
}

ExternalIndex::Interval ExternalIndex::find_extent(ContextView context, std::uint32_t match,
                                                   Interval found, Interval inside) const {
  if (match <= kTables) return find_interval(context, match);
  const auto matches = [&](TextPosition position) {
    return match_length(position, context, kTables) >= match;
  };
  const TextPosition* const order = order_.begin();
  const auto* begin = std::partition_point(order + inside.begin, order + found.begin,
                                           [&](TextPosition p) { return !matches(p); });
  const auto* end = std::partition_point(order + found.end, order + inside.end, matches);
  return Interval{static_cast<TextPosition>(begin - order), static_cast<TextPosition>(end - order)};
}

void ExternalIndex::find(ContextView context, std::uint32_t most,
                         std::vector<Occurrence>& out) const {
  out.clear();
  std::uint32_t known = kTables;
  Interval inside = find_interval(context, known);
  while (inside.size() == 0 && --known > 0) inside = find_interval(context, known);
  if (inside.size() == 0) return;

  const TextPosition* const order = order_.begin();
  const auto* insertion =
      std::partition_point(order + inside.begin, order + inside.end,
                           [&](TextPosition p) { return comes_before(p, context, known); });
  // [left, right) was taken. Further out on both sides the matches only get shorter.
  auto left = static_cast<TextPosition>(insertion - order), right = left;
  std::uint32_t left_match = left > 0 ? match_length(order[left - 1], context, 0) : 0;
  std::uint32_t right_match = right < order_.size() ? match_length(order[right], context, 0) : 0;
  while (out.size() < most) {
    const std::uint32_t match = std::max(left_match, right_match);
    if (match == 0) return;
    const std::size_t room = most - out.size(), taken = right - left;
    Interval found{left, right};
    while (left_match == match && found.size() - taken <= room) {
      --found.begin;
      left_match = found.begin > 0 ? std::min<std::uint32_t>(match, shared_[found.begin]) : 0;
    }
    while (right_match == match && found.size() - taken <= room) {
      ++found.end;
      right_match =
          found.end < order_.size() ? std::min<std::uint32_t>(match, shared_[found.end]) : 0;
    }
    const bool too_many = found.size() - taken > room;
    if (too_many) found = find_extent(context, match, found, inside);
    const std::size_t size = found.size() - taken, parts = too_many ? room : size;
    for (std::size_t k = 0; k < parts; ++k) {
      std::size_t i = found.begin + (too_many ? sample(k, parts, size) : k);
      if (i >= left) i += taken;
      out.push_back(Occurrence{&text_[order[i]], match});
    }
    left = found.begin;
    right = found.end;
  }
}

std::string ExternalIndex::check() const {
  for (std::size_t i = 0; i < order_.size(); ++i) {
    const std::string where = "position " + std::to_string(i) + " of the order";
    if (order_[i] < 2 || order_[i] >= text_.size() || text_[order_[i]] < 0) {
      return where + " names no token";
    }
    if (i == 0) continue;
    std::uint32_t size = 0;
    while (size < kMaxMatch && text_[order_[i] - 1 - size] >= 0) ++size;
    const ContextView context(&text_[order_[i]], size);
    const std::uint32_t match = match_length(order_[i - 1], context, 0);
    if (shared_[i] != match) return where + " has a wrong shared length";
    const bool equal = match == size && (size == kMaxMatch || text_[order_[i - 1] - 1 - match] < 0);
    if (equal ? order_[i - 1] >= order_[i] : !comes_before(order_[i - 1], context, match)) {
      return where + " is out of order";
    }
    for (std::uint32_t length = 1; length <= std::min(size, kTables); ++length) {
      const Interval interval = find_interval(context, length);
      if (i < interval.begin || i >= interval.end) return where + " is not where the table says";
    }
  }
  return {};
}

}  // namespace ngram
