from pytest_bdd import scenarios

scenarios("formats.feature")
