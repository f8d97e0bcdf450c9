from pytest_bdd import scenarios

scenarios("sureness.feature")
