void test_token_log();
void test_calibration();
void test_external_index();

int main() {
  test_token_log();
  test_calibration();
  test_external_index();
}
