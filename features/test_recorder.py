from pytest_bdd import scenarios

scenarios("recorder.feature")
