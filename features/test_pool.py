from pytest_bdd import scenarios

scenarios("pool.feature")
