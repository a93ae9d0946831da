// Command gonsq is what a plain program with go-nsq does: tests/benchmarks compares it with ours.
//
//	gonsq consume -topic=T -channel=C -nsqd=A,B [-workers=1] [-max-in-flight=2500] [-sleep=0s]
//	gonsq publish -topic=T -nsqd=A [-window=64]      one message for each line of standard input
//	gonsq lone -topic=T -nsqd=A [-workers=1] [-sleep=5s]
//		each goroutine publishes one message after the other on a shared producer;
//		prints publishes, median and 99th percentile in microseconds
package main

import (
	"bufio"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"sort"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/nsqio/go-nsq"
)

func main() {
	if len(os.Args) < 2 {
		log.Fatal("gonsq consume|publish|lone")
	}
	flags := flag.NewFlagSet("gonsq", flag.ExitOnError)
	topic := flags.String("topic", "", "")
	channel := flags.String("channel", "", "")
	nsqd := flags.String("nsqd", "127.0.0.1:4150", "addresses, separated by commas")
	workers := flags.Int("workers", 1, "")
	maxInFlight := flags.Int("max-in-flight", 2500, "")
	sleep := flags.Duration("sleep", 0, "time that the handler takes, or that lone publishes")
	window := flags.Int("window", 64, "publishes that may wait for their answer")
	flags.Parse(os.Args[2:])

	config := nsq.NewConfig()
	config.MaxInFlight = *maxInFlight
	config.OutputBufferTimeout = 25 * time.Millisecond
	addresses := strings.Split(*nsqd, ",")
	switch os.Args[1] {
	case "consume":
		consume(config, *topic, *channel, addresses, *workers, *sleep)
	case "publish":
		publish(config, *topic, addresses[0], *window)
	case "lone":
		lone(config, *topic, addresses[0], *workers, *sleep)
	default:
		log.Fatal("gonsq consume|publish|lone")
	}
}

func consume(config *nsq.Config, topic, channel string, addresses []string, workers int, sleep time.Duration) {
	consumer, err := nsq.NewConsumer(topic, channel, config)
	if err != nil {
		log.Fatal(err)
	}
	consumer.SetLoggerLevel(nsq.LogLevelError)
	consumer.AddConcurrentHandlers(nsq.HandlerFunc(func(*nsq.Message) error {
		if sleep > 0 {
			time.Sleep(sleep)
		}
		return nil
	}), workers)
	if err := consumer.ConnectToNSQDs(addresses); err != nil {
		log.Fatal(err)
	}
	terminated := make(chan os.Signal, 1)
	signal.Notify(terminated, syscall.SIGINT, syscall.SIGTERM)
	<-terminated
	consumer.Stop()
	<-consumer.StopChan
}

func publish(config *nsq.Config, topic, address string, window int) {
	producer, err := nsq.NewProducer(address, config)
	if err != nil {
		log.Fatal(err)
	}
	producer.SetLoggerLevel(nsq.LogLevelError)
	done := make(chan *nsq.ProducerTransaction, window)
	outstanding := 0
	settle := func() {
		if transaction := <-done; transaction.Error != nil {
			log.Fatal(transaction.Error)
		}
		outstanding--
	}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		body := append([]byte(nil), lines.Bytes()...)
		if err := producer.PublishAsync(topic, body, done); err != nil {
			log.Fatal(err)
		}
		if outstanding++; outstanding == window {
			settle()
		}
	}
	for outstanding > 0 {
		settle()
	}
	producer.Stop()
	if err := lines.Err(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func lone(config *nsq.Config, topic, address string, workers int, duration time.Duration) {
	producer, err := nsq.NewProducer(address, config)
	if err != nil {
		log.Fatal(err)
	}
	producer.SetLoggerLevel(nsq.LogLevelError)
	body := []byte(strings.Repeat("x", 200))
	end := time.Now().Add(duration)
	latencies := make([][]int, workers)
	var group sync.WaitGroup
	for worker := range latencies {
		group.Add(1)
		go func(worker int) {
			defer group.Done()
			for began := time.Now(); began.Before(end); began = time.Now() {
				if err := producer.Publish(topic, body); err != nil {
					log.Fatal(err)
				}
				latencies[worker] = append(latencies[worker], int(time.Since(began).Microseconds()))
			}
		}(worker)
	}
	group.Wait()
	all := []int{}
	for _, each := range latencies {
		all = append(all, each...)
	}
	sort.Ints(all)
	fmt.Println(len(all), all[len(all)/2], all[len(all)*99/100])
	producer.Stop()
}
