from pytest_bdd import scenarios

scenarios("tensor_parallel.feature")
