"""Compose a pipeline stage by stage, bind it to a target, and write it down as a recipe."""

import dspark


def main(target="mlx-community/Qwen3-0.6B-4bit", prompt="Name three fruits.", out="mine.toml", max_tokens=64):
    pipe = dspark.chain(
        dspark.Prefill(chunk=512),
        dspark.Lookup(min_ngram=3),
        dspark.Verify(),
        dspark.SampleMatch(warp=dspark.warps(dspark.top_p(0.95), dspark.temperature(0.7))),
        dspark.rollback_auto(),
        cap=dspark.ClipCap(dspark.FixedCap(12), lo=0, hi=16),
    )
    dspark.dump(pipe, out)
    engine = dspark.bind(pipe, target)  # loads, checks needs, plans the rollback, proves it
    with engine.open(prompt, max_tokens=max_tokens, seed=7) as session:
        tokens = [token for commit in session for token in commit.tokens]
    print(f"{len(tokens)} tokens in {session.result.rounds} rounds; recipe in {out}")
    return tokens


if __name__ == "__main__":
    main()
