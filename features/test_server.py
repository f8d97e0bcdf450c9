from pytest_bdd import scenarios

scenarios("server.feature")
