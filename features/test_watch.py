from pytest_bdd import scenarios

scenarios("watch.feature")
