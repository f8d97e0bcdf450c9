from pytest_bdd import scenarios

scenarios("eviction.feature")
