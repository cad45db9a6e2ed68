"""A programmer and a tester: one role writes programs, the other the tests that break them."""
