from pytest_bdd import scenarios

scenarios("allocator_safety.feature")
