from pytest_bdd import scenarios

scenarios("live_page.feature")
