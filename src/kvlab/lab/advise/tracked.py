def track(advice, config, directory):
    pass
