from pytest_bdd import scenarios

scenarios("my_traffic.feature")
