void test_token_log();
void test_chained_log();
void test_calibration();
void test_context_index();
void test_corpus();
void test_serialisation();

int main() {
  test_token_log();
  test_chained_log();
  test_calibration();
  test_context_index();
  test_corpus();
  test_serialisation();
}
