from pytest_bdd import scenarios

scenarios("service_levels.feature")
