"""Sample with a seed: the same seed says the same under any drafter; another seed says something else."""

import dspark


def main(engine=None, prompt="Invent a name for a boat.", seeds=(1, 1, 2), max_tokens=24):
    engine = engine or dspark.load("smollm2-135m").bind()
    warm = dspark.Sampling(temperature=0.8, top_p=0.95, repetition_penalty=1.1)
    answers = []
    for seed in seeds:
        with engine.open(prompt, max_tokens=max_tokens, sampling=warm, seed=seed) as session:
            list(session)
        answers.append(session.result.tokens)
        print(f"seed {seed}: {session.result.text!r}")
    return answers


if __name__ == "__main__":
    main()
