# syntax=docker/dockerfile:1
# Builds the binary from this folder, then leaves everything but it behind.
FROM rust:1-bookworm AS build
WORKDIR /src
COPY . .
RUN cargo install --locked --path crates/server --root /installed

FROM debian:bookworm-slim
# Subversion is for `postrider scm sync svn`; the rest needs certificates alone.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes ca-certificates curl subversion \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --home-dir /var/lib/postrider --create-home postrider
COPY --from=build /installed/bin/postrider /usr/local/bin/postrider
USER 10001
WORKDIR /var/lib/postrider
VOLUME /var/lib/postrider
EXPOSE 8787
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s CMD ["curl", "-fsS", "http://127.0.0.1:8787/readyz"]
# Beyond loopback the server wants a token to exist: docker run … token create --name me --scope admin
ENTRYPOINT ["postrider"]
CMD ["serve", "--listen", "0.0.0.0:8787"]
